"""Renders conversations with chat templates: sandboxed Jinja, with the helpers of Hugging Face's tokenizers.

https://huggingface.co/docs/transformers/chat_templating_writing describes the functions and variables. Jinja's sandbox
lets a template read only its inputs; `chat.sandbox` limits a template's CPU time and the size of its results.
"""

import datetime
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from trainer.chat.sandbox import Sandbox
from trainer.config.errors import UserError, shortened
from trainer.config.limits import RENDERED_CHARACTERS, TEMPLATE_CHARACTERS
from trainer.config.words import visible
from trainer.data.chat_files import ChatTemplate
from trainer.data.rendered import Range, Rendered, pattern

# The date that templates see during training. It is fixed, so that a run resumed on another day renders the same text.
TRAINING_DATE = datetime.datetime(2026, 1, 1)
# The template for tokenizers that have no template.
DEFAULT = ChatTemplate(
    """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- 'Assistant:\\n' }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- message.role.capitalize() + ':\\n' }}{{ message.content }}{{ '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}""",
    "the default template",
)
# Temporary marks around `{% generation %}` text and around the names of special tokens in messages. Unicode reserves
# these characters for internal use; `trainer.chat.conversations` removes them from messages.
_BEGIN, _END, _NAME, _NAME_END = MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"
_PROBE = "a text that no template has"
_MARK = re.compile(f"[{MARKS}]")
# The exceptions that an expression in a template can raise.
_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RuntimeError, NameError, MemoryError, AssertionError),
)


class TemplateFailed(UserError):
    """Raised if a template cannot render a conversation."""


class _NoContent(jinja2.Undefined):
    """The value of a message's content if the content is null or absent, for example because the message only calls
    tools. In a template, this value passes the test `is none` and prints nothing."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which encloses the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Namespace(jinja2.utils.Namespace):
    """A Jinja namespace that refuses attributes whose names begin with "_", because Python itself looks up some
    attributes of this kind, such as `__class__`."""

    def __init__(*args: Any, **kwargs: Any):
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # without the contents, which can be large


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace has no attribute {name}")


class Template:
    """A chat template.

    Attributes:
      texts: a list of the text of this template and, if the template has a variant for conversations with tools, the
        text of this variant.
      marks_generation: whether this template marks the assistant's text with `{% generation %}`.
    """

    def __init__(self, template: ChatTemplate, names: Mapping[str, str], special: Sequence[str] = (), *, today=False):
        """
        Args:
          names: the values of the variables bos_token, eos_token, ...
          special: the names of special tokens. In a message, these names are ordinary text.
          today: whether templates print today's date instead of TRAINING_DATE.

        Raises:
          UserError: the template is too long, or is not valid Jinja.
        """
        self.text, self.where, with_tools = template
        if len(self.text) > TEMPLATE_CHARACTERS:
            raise UserError(f"{self.where}: a chat template of more than {TEMPLATE_CHARACTERS:,} characters")
        self._names, self._special, self._today = dict(names), tuple(special), today
        other = ChatTemplate(with_tools, f"{self.where}, tool_use")
        self._with_tools = Template(other, names, special, today=today) if with_tools else None
        self.texts = [self.text, *filter(None, [with_tools])]
        self.marks_generation = bool(re.search(r"{%[-+]?\s*generation\s*[-+]?%}", self.text))
        assert self._compiled

    def of(self, tools: Any) -> "Template":
        """Returns the template to use for a conversation: this one or its variant for tools. `tools`: the
        conversation's tools, or None."""
        return self if tools is None or self._with_tools is None else self._with_tools

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, prompt: bool = False) -> Rendered:
        """Returns the text of a conversation. `prompt`: whether to add the beginning of the assistant's next turn.

        Raises:
          TemplateFailed: the template cannot render the conversation.
        """
        said = [_in_parts(message) for message in messages] if self._takes_parts else messages
        return self._render([_without_null(message) for message in said], tools, prompt)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, prompt: bool) -> Rendered:
        given = self._named({"messages": messages, "tools": tools})
        size, chunks = 0, []
        self._compiled.environment.begin()  # type: ignore[attr-defined]
        try:
            for chunk in self._compiled.generate(**self._names, **given, documents=None, add_generation_prompt=prompt):
                chunks.append(chunk)
                if (size := size + len(chunk)) > RENDERED_CHARACTERS:
                    raise jinja2.sandbox.SecurityError(f"the text has more than {RENDERED_CHARACTERS:,} characters")
            text = "".join(chunks)
            text.encode()  # raises UnicodeEncodeError for a lone surrogate, which no tokenizer accepts
        except _ERRORS as error:
            raise TemplateFailed(
                f"the chat template ({self.where}) cannot render the conversation: "
                f"{shortened(visible(str(error))) or type(error).__name__}"
            ) from error
        return _without_marks(text)

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.tests["none"] = lambda value: value is None or isinstance(value, _NoContent)
        environment.globals |= {"raise_exception": _raise, "strftime_now": self._strftime, "namespace": _Namespace}
        try:
            return environment.from_string(self.text)
        except (*_ERRORS, SyntaxError) as error:  # SyntaxError: Python cannot compile the code that Jinja generated
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            why = shortened(visible(error.msg if isinstance(error, SyntaxError) else str(error)))
            raise UserError(f"{self.where}{line} is not a chat template in Jinja: {why}") from error

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """Whether the template renders content only if it is a list of parts, as some templates of vision models do."""
        message = {"role": "user", "content": _PROBE}

        def shows(message: Mapping[str, Any]) -> bool:
            try:
                return _PROBE in self._render([message], None, False).text
            except TemplateFailed:
                return False

        return not shows(message) and shows(_in_parts(message))

    @functools.cached_property
    def _names_in(self) -> re.Pattern[str]:
        return pattern(self._special)

    def _named(self, value: Any) -> Any:
        """Returns `value` with marks around the names of special tokens in all of its texts, at any depth."""
        if isinstance(value, str):
            return self._names_in.sub(f"{_NAME}\\g<0>{_NAME_END}", value)
        if isinstance(value, Mapping):
            return {key: self._named(item) for key, item in value.items()}
        return [self._named(item) for item in value] if isinstance(value, list) else value

    def _strftime(self, form: str) -> str:
        return (datetime.datetime.now() if self._today else TRAINING_DATE).strftime(form)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}


def _without_marks(marked: str) -> Rendered:
    """Returns the text without the marks, and the ranges of characters that were between marks."""
    parts: list[str] = []
    learnt: list[Range] = []
    plain: list[Range] = []
    length, depth, begin, name = 0, 0, 0, -1
    for mark, text in _marked_parts(marked):
        if mark == _BEGIN:
            begin, depth = (begin if depth else length), depth + 1
        elif mark == _END and depth:
            depth -= 1
            if not depth and length > begin:
                learnt.append((begin, length))
        elif mark == _NAME_END and 0 <= name < length:
            plain.append((name, length))
        name = length if mark == _NAME else -1
        parts.append(text)
        length += len(text)
    return Rendered("".join(parts), tuple(learnt), tuple(plain))


def _marked_parts(marked: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of a mark and the text from this mark to the next. In the first pair, the mark is "" and the text is
    the one before the first mark."""
    mark, end = "", 0
    for match in _MARK.finditer(marked):
        yield mark, marked[end : match.start()]
        mark, end = match[0], match.end()
    yield mark, marked[end:]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _without_null(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("content") is not None:
        return message
    order = () if "content" in message else ("role", "content")
    return {**dict.fromkeys(order), **message, "content": _NoContent(name="content")}


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if max(one if isinstance(one, int) else len(one) for one in (indent or 0, separators or 0)) > 16:
        raise jinja2.sandbox.SecurityError("tojson indents by at most 16 characters")
    given = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, default=_null, **given)


def _null(value: Any) -> None:
    if not isinstance(value, _NoContent):
        raise TypeError(f"{type(value).__name__} is not JSON")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
