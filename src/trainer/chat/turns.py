"""Which characters of a rendered conversation are learnt: what the assistant says, up to the end of its turn.

A template that has `{% generation %}` says so itself. Otherwise, a turn is what the conversation up to it has more than
the conversation before it with the beginning of the assistant's turn, which is what generation sees. Both must be at
the beginning of the whole text. A turn for which they are not is not learnt: training would show the model another text
than generation. Templates that drop earlier reasoning do this to all turns but the last.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.chat.template import Template, TemplateFailed
from trainer.config.errors import shortened
from trainer.config.words import visible
from trainer.data.rendered import Range, Rendered

_BEFORE, _AFTER = 20, 50  # characters around the first difference, in a message


class Turns(NamedTuple):
    """A rendered conversation with what is learnt of it.

    Attributes:
      learnt: the ranges that are learnt, in order.
      differing: for each turn that generation would see otherwise, how.
      unended: how many learnt ranges do not end with a token that can end a turn.
    """

    rendered: Rendered
    learnt: list[Range]
    differing: list[str]
    unended: int


def turns(
    template: Template, messages: Sequence[dict[str, Any]], tools: Any, markers: re.Pattern[str], first: int = 0
) -> Turns:
    """Returns what is learnt of a conversation from message `first` on. `markers` matches tokens that can end a turn.

    Raises:
      TemplateFailed: the template cannot render the conversation.
    """
    template = template.of(tools)
    whole = template.render(messages, tools)
    placed: list[Range] = []
    differing: list[str] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first:
            continue
        found = _turn(template, messages, tools, i, whole.text, markers)
        if isinstance(found, str):
            differing.append(f"message {i + 1}: {found}")
        else:
            placed.append(found)
    learnt = placed
    if template.marks_generation:
        earlier = len(template.render(messages[:first], tools).learnt) if first else 0
        learnt = [*whole.learnt[earlier:]]
    ends = [whole.text[start:stop].rstrip() for start, stop in learnt]
    unended = sum([match.end() for match in markers.finditer(text)][-1:] != [len(text)] for text in ends)
    return Turns(whole, learnt, differing, unended)


def _turn(
    template: Template, messages: Sequence[dict[str, Any]], tools: Any, i: int, whole: str, markers: re.Pattern[str]
) -> Range | str:
    """Returns the range of the turn of message `i`, without white space after its last token; or why there is none."""
    try:
        before = template.render(messages[:i], tools, prompt=True).text
        upto = whole if i + 1 == len(messages) else template.render(messages[: i + 1], tools).text
    except TemplateFailed as error:
        return str(error)
    if not upto.startswith(before):
        return f"generation begins after {_difference(before, upto)}"
    ends = [match.end() for match in markers.finditer(upto, len(before))][-1:]
    end = next((end for end in ends if not upto[end:].strip()), len(upto))
    if not whole.startswith(upto[:end]):
        # Phi 3's template ends each text with one more token, which is not in a longer conversation.
        closed = [match.end() for match in markers.finditer(upto, len(before), _shared(upto, whole))][-1:]
        if not closed or markers.sub("", upto[closed[0] :]).strip():
            return f"generation sees {_difference(upto[:end], whole)}"
        (end,) = closed
    return len(before), end


def _shared(one: str, other: str) -> int:
    """Returns how many characters are equal at the beginning of both texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(generated: str, trained: str) -> str:
    """Returns, for people, where two texts first differ."""
    at = _shared(generated, trained)
    here = slice(max(0, at - _BEFORE), at + _AFTER)
    return " and training ".join(shortened(repr(visible(text[here]))) for text in (generated, trained))
