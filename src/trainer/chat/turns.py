"""Determines which characters of a rendered conversation are trained, that is, contribute to the loss: the assistant's
text, up to the end of its turn.

A template with `{% generation %}` marks these characters itself. Otherwise, each turn is located by two renderings. The
first rendering is the text that the model sees in generation: it ends where the assistant's text begins. The second
rendering ends after the turn. The turn is the text that the second rendering adds to the first. The rendering of the
complete conversation must begin with both of these renderings. If it does not, the turn is not trained, because the
model would see a different text in training than in generation. For example, if a template removes reasoning from
earlier turns, these turns are not trained.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.chat.template import Template, TemplateFailed
from trainer.config.errors import shortened
from trainer.config.words import visible
from trainer.data.rendered import Range, Rendered

_BEFORE, _AFTER = 20, 50  # characters that a message shows before and after the position of a difference


class Turns(NamedTuple):
    """A rendered conversation, and the ranges of its characters that are trained.

    Attributes:
      learnt: the trained ranges, in order.
      differing: for each turn whose text would differ in generation, a description of the difference.
      unended: the number of trained ranges that do not end with a token that can end a turn.
    """

    rendered: Rendered
    learnt: list[Range]
    differing: list[str]
    unended: int


def turns(
    template: Template, messages: Sequence[dict[str, Any]], tools: Any, markers: re.Pattern[str], first: int = 0
) -> Turns:
    """Renders a conversation, and determines its trained ranges from message `first` on. `markers` matches tokens that
    can end a turn.

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
    """Returns the range of characters of message `i`'s turn, without white space after the token that ends the turn. If
    the turn is not trained, returns a text that describes the reason instead."""
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
        # Phi 3's template ends a rendering with a token that is absent after the same turn in a longer conversation.
        closed = [match.end() for match in markers.finditer(upto, len(before), _shared(upto, whole))][-1:]
        if not closed or markers.sub("", upto[closed[0] :]).strip():
            return f"generation sees {_difference(upto[:end], whole)}"
        (end,) = closed
    return len(before), end


def _shared(one: str, other: str) -> int:
    """Returns the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(generated: str, trained: str) -> str:
    """Returns a description of the first difference between the text that generation sees and the trained text."""
    at = _shared(generated, trained)
    here = slice(max(0, at - _BEFORE), at + _AFTER)
    return ", but training sees ".join(shortened(repr(visible(text[here]))) for text in (generated, trained))
