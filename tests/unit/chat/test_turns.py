"""Which parts of a conversation are trained: random templates against an oracle, and templates like published ones."""

import random
from typing import NamedTuple

import numpy as np
import pytest
from sample_data import document

from trainer.chat.template import Template
from trainer.chat.turns import turns
from trainer.data.chat_files import ChatTemplate
from trainer.data.rendered import pattern
from trainer.data.tokenizer import EOT_TEXT, ByteTokenizer, Tokenizer, train_bpe

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DROPPING = "(message.content if loop.last or message.role == 'user' else message.content[-2:])"
MARKERS = pattern(["<|im_end|>", EOT_TEXT])
SAID = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>x</think>Yo"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "OK"},
]


class Style(NamedTuple):
    """The properties of a random template."""

    start: str
    header: dict[str, str]  # before the content, by role
    end: dict[str, str]  # after the content, by role
    trims: bool
    drops_reasoning: bool
    prompts: bool  # whether the template reads add_generation_prompt
    marks: bool

    def template(self) -> str:
        """Returns the template in Jinja."""
        said = "{{ text + end }}"
        said = f"{{% generation %}}{said}{{% endgeneration %}}" if self.marks else said
        content = "message.content.split('</think>')[-1]" if self.drops_reasoning else "message.content"
        return (
            f"{{% set header, ends = {self.header!r}, {self.end!r} %}}{{{{ {self.start!r} }}}}"
            "{% for message in messages %}{% set text, end = message.content, ends[message.role] %}"
            f"{{% if message.role == 'assistant' and not loop.last %}}{{% set text = {content} %}}{{% endif %}}"
            f"{{% set text = text{' | trim' if self.trims else ''} %}}{{{{ header[message.role] }}}}"
            f"{{% if message.role == 'assistant' %}}{said}{{% else %}}{{{{ text + end }}}}{{% endif %}}"
            "{% endfor %}" + ("{% if add_generation_prompt %}{{ header.assistant }}{% endif %}" if self.prompts else "")
        )

    def oracle(self, messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        """Returns the rendered text in parts, each with whether it is trained."""
        parts, before = [(self.start, False)], False
        for i, message in enumerate(messages):
            role, text, last = message["role"], message["content"], i + 1 == len(messages)
            # During generation, the reasoning of the turn directly before is still visible.
            unlike, before = before, role == "assistant" and self.drops_reasoning and "</think>" in text
            dropped = before and not last
            text = text.split("</think>")[-1] if dropped else text
            text = text.strip() if self.trims else text
            end = self.end[role]
            learnt = role == "assistant" and (self.marks or not (dropped or unlike))
            shown = end if self.marks or not end.rstrip().endswith(EOT_TEXT) else end.rstrip()
            parts += [(self.header[role], learnt and not self.prompts and not self.marks)]
            parts += [(text, learnt), (shown, learnt), (end[len(shown) :], False)]
        return parts


def random_style(draw: random.Random) -> Style:
    def piece() -> str:
        return "".join(draw.choices(["<|", "|>", "user", " ", "\n", "ä", "A:", "[x]", EOT_TEXT], k=draw.randint(0, 4)))

    roles = ("system", "user", "assistant")
    ends = {role: draw.choice(["", "\n", EOT_TEXT, f"{EOT_TEXT}\n", f"x{EOT_TEXT} \n", "\n\n"]) for role in roles}
    # A header begins with a word, so that white space after a turn is not trimmed into it.
    headers = {role: f"{role[0]}{piece()}" for role in roles}
    flags = [draw.random() < 0.5 for _ in range(4)]
    return Style(piece(), headers, ends, *flags)


def random_messages(draw: random.Random) -> list[dict[str, str]]:
    words = ["a", "é😀", " ", "\n", "<think>r</think>", "long words", "</think>", "0"]
    roles = ["system"] * draw.randint(0, 1) + draw.choices(["user", "assistant"], k=draw.randint(1, 6))
    texts = ["".join(draw.choices(words, k=draw.randint(1, 5))) for _ in roles]
    return [{"role": role, "content": text if text.strip() else "a"} for role, text in zip(roles, texts, strict=True)]


def by_characters(tokenizer: Tokenizer, ids: np.ndarray, learnt: str) -> list[bool]:
    """Returns for each token whether one of its characters is trained. `learnt` has 1 or 0 for each byte."""
    assert tokenizer.bytes_per_token is not None
    mask, at = [], 0
    for i in ids.tolist():
        width = len(EOT_TEXT) if i == tokenizer.eos else int(tokenizer.bytes_per_token[i])
        mask.append("1" in learnt[at : at + width])
        at += width
    assert at == len(learnt)
    return mask


@pytest.fixture(scope="module")
def tokenizers() -> list[Tokenizer]:
    return [ByteTokenizer(), train_bpe([*map(document, range(20)), "\n\n<|user|>\nlong words A: |><| [x]"] * 3, 330)]


@pytest.mark.parametrize("seed", range(40))
def test_random_templates(seed: int, tokenizers: list[Tokenizer]):
    draw = random.Random(seed)
    for _ in range(8):
        style, messages = random_style(draw), random_messages(draw)
        template = Template(ChatTemplate(style.template(), "random"), {}, [EOT_TEXT])
        assert template.marks_generation == style.marks
        found = turns(template, messages, None, MARKERS)
        parts = style.oracle(messages)
        assert found.rendered.text == "".join(text for text, _ in parts)
        learnt = "".join(str(int(flag)) * len(text.encode()) for text, flag in parts)
        for tokenizer in tokenizers:
            (encoded,) = tokenizer.encode_rendered([found.rendered])
            wanted = by_characters(tokenizer, encoded.ids, learnt)
            if not isinstance(tokenizer, ByteTokenizer):
                assert encoded.within(found.learnt).tolist() == wanted, (style, messages)
            else:  # all bytes of a character have the character's flag
                assert encoded.within(found.learnt).tolist() == wanted


def learnt_of(template: str, messages=SAID, **names: str) -> tuple[list[str], list[str], int]:
    found = turns(Template(ChatTemplate(template, "here"), names), messages, None, MARKERS)
    return [found.rendered.text[start:stop] for start, stop in found.learnt], found.differing, found.unended


def test_tools_are_in_what_generation_sees():
    template = Template(ChatTemplate("{{ tools[0].name }}" + CHATML, "here"), {})
    found = turns(template, SAID, [{"name": "f"}], MARKERS)
    assert (len(found.learnt), found.differing) == (2, [])


def test_a_turn_ends_with_the_token_that_ends_it():
    assert learnt_of(CHATML) == (["<think>x</think>Yo<|im_end|>", "OK<|im_end|>"], [], 0)


def test_turns_without_such_a_token_are_counted():
    said, _, unended = learnt_of(CHATML.replace("<|im_end|>", ""))
    assert said == ["<think>x</think>Yo\n", "OK\n"]
    assert unended == 2


def test_a_token_after_the_last_turn_only():
    template = CHATML.replace("{% endif %}", f"{{% else %}}{EOT_TEXT}{{% endif %}}")
    assert learnt_of(template) == (["<think>x</think>Yo<|im_end|>", f"OK<|im_end|>\n{EOT_TEXT}"], [], 0)
    said, differing, _ = learnt_of(template.replace("<|im_end|>", ""))
    assert (said, len(differing)) == ([f"OK\n{EOT_TEXT}"], 1)


def test_dropped_reasoning_is_found_and_not_learnt():
    template = CHATML.replace("message.content +", DROPPING + " +")
    said, differing, _ = learnt_of(template)
    assert said == ["OK<|im_end|>"]
    (line,) = differing
    assert "message 2: generation sees" in line
    assert "<think>x</think>Yo" in line.partition("and training")[0]
    assert "<think>" not in line.partition("and training")[2]


def test_dropped_reasoning_is_found_if_the_template_says_what_is_learnt():
    template = CHATML.replace(
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        f"{{{{- '<|im_start|>' + message.role + '\\n' }}}}{{% generation %}}{{{{ {DROPPING} }}}}<|im_end|>"
        "{% endgeneration %}{{ '\\n' }}",
    )
    said, differing, _ = learnt_of(template)
    assert said == ["Hi<|im_end|>", "Yo<|im_end|>", "And?<|im_end|>", "OK<|im_end|>"]  # the marked parts, of every role
    assert len(differing) == 1


def test_a_prompt_that_training_does_not_show_is_found():
    template = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>' }}{% endif")
    said, differing, _ = learnt_of(template, SAID[2:])
    assert said == []
    assert "generation begins after" in differing[0]


def test_a_template_that_refuses_a_prefix_leaves_its_turn_out():
    template = "{% if messages | length == 1 %}{{ raise_exception('too short') }}{% endif %}" + CHATML
    said, differing, _ = learnt_of(template)
    assert said == ["OK<|im_end|>"]
    assert "too short" in differing[0]


def test_a_template_without_a_generation_prompt_learns_the_header():
    template = CHATML.partition("{%- if add_gen")[0]
    assert learnt_of(template)[0][-1] == "<|im_start|>assistant\nOK<|im_end|>"
