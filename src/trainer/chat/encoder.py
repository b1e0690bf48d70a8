"""Encodes conversations as documents for supervised fine-tuning. `data.open_dataset` uses this encoder."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from trainer.chat.conversations import Formatter, Message, conversation
from trainer.chat.template import DEFAULT, TRAINING_DATE, Template, TemplateFailed
from trainer.chat.turns import Turns, turns
from trainer.config.capabilities.chat_keys import TOOLS
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.words import visible
from trainer.data.chat_files import ChatTemplate, read_template
from trainer.data.documents import Counts, Document, Encoder, Record, text_of
from trainer.data.rendered import Encoded, Rendered, pattern
from trainer.data.tokenizer import Tokenizer

_FORMAT = 1  # increment it when the tokens or masks of the same conversation change
SHOWN = 2000  # the maximum number of characters of a conversation that an error shows


class Example(NamedTuple):
    """A conversation, its tokens [n], and a mask of the trained tokens: bool [n]."""

    turns: Turns
    encoded: Encoded
    learnt: np.ndarray


@dataclass(frozen=True)
class ChatEncoder(Encoder):
    """An `Encoder` of conversations.

    It adds no tokens before or after a conversation, because the template writes the complete text.

    Attributes:
      template: converts conversations to text.
      formatter: the user's function that converts records to messages, if any.
      longest: the number of targets after which a conversation is truncated; None if it may continue in another row.
    """

    noun: ClassVar[str] = "conversation"

    template: Template
    formatter: Formatter | None
    longest: int | None

    @property
    def masked(self) -> bool:
        return self.completion_only

    @property
    def whole(self) -> bool:
        return False  # no target covers the first token, and special tokens count as 0 bytes

    @property
    def identity(self) -> dict[str, Any]:
        has_tools = TOOLS in self.columns or self.formatter is not None
        return super().identity | {
            "template": [_FORMAT, *self.template.texts[: 1 + has_tools], TRAINING_DATE.isoformat()],
            "names": self._tokenizer.special_names and sorted(self._tokenizer.special_names.items()),
            "formatter": self.formatter and self.formatter.identity,
        }

    def encode(self, records: Sequence[Record], counts: Counts) -> list[Document | None]:
        """See `Encoder.encode`. Skips conversations without a trained target.

        Raises:
          UserError: a record is not a conversation, or the template cannot render it; the error names the record.
        """
        examples = self.examples(records, counts)
        return [
            example and self.document(example, counts, record)
            for example, record in zip(examples, records, strict=True)
        ]

    def lengths(self, records: Sequence[Record], counts: Counts) -> Iterator[int]:
        """Yields the number of tokens of each nonempty conversation in `records`. Errors are as in `encode`."""
        return (len(example.learnt) for example in self.examples(records, counts) if example)

    def examples(self, records: Sequence[Record], counts: Counts) -> list[Example | None]:
        """Returns the encoded conversation of each record; None for a record without messages. Errors are as in
        `encode`."""
        found = [self._of_record(record, counts) for record in records]
        encoded = iter(self.encoded([one for one in found if one]))
        return [one and next(encoded) for one in found]

    def encoded(self, found: Sequence[Turns]) -> list[Example]:
        """Encodes rendered conversations. Returns each with its tokens and mask."""
        examples = []
        every = self._tokenizer.encode_rendered([one.rendered for one in found])
        for one, tokens in zip(found, every, strict=True):
            _check_ids(tokens, self._tokenizer, self.vocab_size)
            learnt = tokens.within(one.learnt) if self.completion_only else np.ones(len(tokens.ids), bool)
            examples.append(Example(one, tokens, learnt))
        return examples

    def _of_record(self, record: Record, counts: Counts) -> Turns | None:
        (messages, tools), replaced = conversation(record, self.columns, self.formatter)
        count_replaced(replaced, record, counts)
        if not messages:
            counts.empty += 1
            return None
        return self.turns(messages, tools, record, counts)

    def turns(self, messages: Sequence[Message], tools: Any, record: Record, counts: Counts, first: int = 0) -> Turns:
        """Renders a conversation and determines its trained parts. Messages before index `first` are not trained."""
        try:
            found = turns(self.template, messages, tools, self._markers, first)
        except TemplateFailed as error:
            raise UserError(f"{record.where}: {error}") from error
        counts.bytes += len(found.rendered.text.encode())
        self._notice(found, record, counts, self.template.of(tools).marks_generation)
        return found

    def _notice(self, found: Turns, record: Record, counts: Counts, marked: bool) -> None:
        if self.completion_only and found.differing:
            kept = "are not trained (a template can mark the trained text with {% generation %})"
            kept = "are trained as rendered in the conversation" if marked else kept
            counts.notice(
                "differing",
                lambda: (
                    "turns of the assistant are rendered differently in a complete conversation than during "
                    f"generation, and {kept}; the first in {record.where}, {found.differing[0]}"
                ),
                len(found.differing),
            )
        if self.completion_only and found.unended:
            counts.notice(
                "unended",
                lambda: (
                    "turns of the assistant end without a special token, so generation will not know where to "
                    f"stop; the first in {record.where}"
                ),
                found.unended,
            )
        self.notice_plain(found.rendered, record, counts)

    def notice_plain(self, rendered: Rendered, record: Record, counts: Counts) -> None:
        """Counts names of special tokens that occur in messages."""
        if rendered.plain:
            start, stop = rendered.plain[0]
            counts.notice(
                "plain",
                lambda: (
                    f"names of special tokens in messages are encoded as ordinary text; the first in {record.where}: "
                    f"{visible(rendered.text[start:stop])}"
                ),
                len(rendered.plain),
            )

    def document(self, example: Example, counts: Counts, record: Record) -> Document | None:
        """Returns the document of a conversation. Returns None, and counts the conversation as skipped, if none of its
        first `longest` targets is trained."""
        found, encoded, learnt = example
        loss = learnt[1:]
        if not loss[: self.longest].any():
            why = "they have no trained tokens"
            if loss.any():
                why = f"their first trained token is after max_target_length={self.longest} tokens"
                counts.long(len(encoded.ids))
            counts.skipped += 1
            counts.notice(why, lambda: f"conversations are skipped, because {why}; the first in {record.where}")
            counts.unlearnt = counts.unlearnt or visible(found.rendered.text[:SHOWN])
            return None
        self.notice_crossing(example, counts, record)
        counts.documents += 1
        return Document(encoded.ids, loss if self.masked else None)

    def notice_crossing(self, example: Example, counts: Counts, record: Record) -> None:
        """Counts tokens that begin before a trained range of the text and end within this range."""
        found, encoded, _ = example
        crossing = sum(int(np.sum((encoded.starts < start) & (encoded.stops > start))) for start, _ in found.learnt)
        if crossing and self.completion_only:
            counts.notice(
                "crossing",
                lambda: f"tokens that begin before trained text and end in it are trained; the first in {record.where}",
                crossing,
            )

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer

    @functools.cached_property
    def _markers(self) -> re.Pattern[str]:
        return pattern(self._tokenizer.markers)


def chat_encoder(config: Config, tokenizer: Tokenizer | None, columns: tuple[str, ...], tokenize: bool) -> ChatEncoder:
    """Returns the encoder of conversations for `data.open_dataset`. Also sets the tokenizer's template.

    Raises:
      UserError: the template or the formatting function does not exist or is not valid.
    """
    assert tokenizer is not None
    template, formatter = open_template(config, tokenizer), open_formatter(config)
    continues = not config.use_truncation or (config.packing and config.grain_packing_type == "concat_then_split")
    return ChatEncoder(
        tokenizer,
        columns,
        tokenize,
        config.sft_train_on_completion_only,
        config.vocab_size,
        template,
        formatter,
        None if continues else config.max_target_length,
    )


def open_formatter(config: Config) -> Formatter | None:
    """Returns the formatting function at formatting_func_path; None if this key is empty.

    Raises:
      UserError: the function cannot be imported, or the file at its template_path cannot be read.
    """
    path = config.formatting_func_path
    kwargs: Any = config.formatting_func_kwargs
    formatter = Formatter(path, kwargs.to_dict()) if path else None
    if formatter is not None:
        formatter.load()
    return formatter


def open_template(config: Config, tokenizer: Tokenizer, *, today: bool = False) -> Template:
    """Returns the chat template: the one in chat_template or chat_template_path, else the tokenizer's, else the
    default.

    Also stores the template in the tokenizer. `today`: whether templates print today's date.

    Raises:
      UserError: the template cannot be read.
    """
    if config.chat_template:
        found = ChatTemplate(config.chat_template, "chat_template")
    elif config.chat_template_path:
        found = read_template(local_path(config.chat_template_path, "chat_template_path="))
    else:
        found = tokenizer.chat_template or DEFAULT
    tokenizer.chat_template = found
    return Template(found, tokenizer.special_names, tuple(tokenizer.special_tokens), today=today)


def count_replaced(replaced: int, record: Record, counts: Counts) -> None:
    """Counts a record in which `replaced` characters were replaced, if there are any."""
    if replaced:
        counts.mended_first = counts.mended_first or str(record.where)
        counts.mended += 1
        counts.mended_characters += replaced


def _check_ids(encoded: Encoded, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError if an id is outside of the model's vocabulary. For example, a token may have been added to the
    tokenizer but not to the model."""
    most = int(encoded.ids.max(initial=0))
    if most >= vocab_size:
        name = next((name for name, i in tokenizer.markers.items() if i == most), "")
        raise UserError(
            f"vocab_size={vocab_size}, but the chat template writes the token {name or most} with id {most}: set "
            f"vocab_size={tokenizer.vocab_size} or more, or give the model's own tokenizer_path or another template"
        )


class Prompts:
    """Renders prompts as the user's message in a conversation, for generation.

    `own_template`: whether a template other than the default one is used. If so, the model was probably trained on
    conversations.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        say: Callable[[str], None] = lambda line: None,
        *,
        today: bool = True,
    ):
        """Reports which template is used. Arguments and errors are as in `open_template`."""
        self.template, self._tokenizer = open_template(config, tokenizer, today=today), tokenizer
        self._vocab_size = config.vocab_size
        self.own_template = tokenizer.chat_template is not DEFAULT
        say(f"chat template: {self.template.where}")

    def tokens(self, prompt: str) -> list[int]:
        """Returns the tokens of a conversation with the user message `prompt`, up to the start of the assistant's
        answer.

        Raises UserError if the template cannot render the conversation.
        """
        return self.tokens_of(Record("prompt", ([{"role": "user", "content": prompt}],)))

    def tokens_of(self, record: Record) -> list[int]:
        """Renders the first column of `record`: a conversation, or the text of a user message. Returns the tokens up to
        the start of the assistant's next answer.

        Raises UserError if the column contains no conversation, or if the template cannot render the conversation.
        """
        value = record.values[0]
        if isinstance(value, str | bytes):
            record = Record(record.where, ([{"role": "user", "content": text_of(value, "prompt", record)[0]}],))
        (messages, _), _ = conversation(Record(record.where, record.values[:1]), ("prompt",), None)
        return self._encoded(self.template.render(messages, prompt=True)).ids.tolist()

    def answer_tokens(self, record: Record) -> list[int]:
        """Renders the answer in the second column of `record` as the assistant's answer to the prompt in the first
        column. Returns the tokens of the rendered answer, including the token that ends it; [] if the template changes
        the answer.

        Errors are as in `tokens_of`.
        """
        (messages, _), _ = conversation(Record(record.where, record.values[:2]), ("prompt", "completion"), None)
        try:
            found = turns(self.template, messages, None, pattern(self._tokenizer.markers), len(messages) - 1)
        except TemplateFailed as error:
            raise UserError(f"{record.where}: {error}") from error
        encoded = self._encoded(found.rendered)
        return encoded.ids[encoded.within(found.learnt)].tolist()

    def _encoded(self, rendered: Rendered) -> Encoded:
        (encoded,) = self._tokenizer.encode_rendered([rendered])
        _check_ids(encoded, self._tokenizer, self._vocab_size)
        return encoded

    def stop_tokens(self) -> list[int]:
        """Returns a list that contains only the token that ends the assistant's turn; [] if the template writes no such
        token."""
        said = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
        try:
            found = turns(self.template, said, None, pattern(self._tokenizer.markers))
        except TemplateFailed:
            return []
        (encoded,) = self._tokenizer.encode_rendered([found.rendered])
        _, stop = found.learnt[-1] if found.learnt else (0, 0)
        last = [int(i) for i, end in zip(encoded.ids, encoded.stops, strict=True) if end <= stop][-1:]
        return [i for i in last if i in self._tokenizer.markers.values()]


def answer_of(record: Record, column: str, tokenizer: Tokenizer, chat: Prompts | None) -> list[int]:
    """Returns the tokens of the answer in a record's second column, including the token that ends the answer.

    Returns [] for an empty answer. `column`: the name of the second column. Errors are as in `prompt_of`.
    """
    text = text_of(record.values[1], column, record)[0]
    if not text:
        return []
    if chat is not None:
        return chat.answer_tokens(record)
    return [*tokenizer.encode(text), *([] if tokenizer.eos is None else [tokenizer.eos])]


def prompt_of(record: Record, column: str, tokenizer: Tokenizer, chat: Prompts | None) -> tuple[Any, list[int]]:
    """Returns the prompt in a record's first column, and a list of the prompt's tokens. Without `chat`, the list is
    empty for empty text.

    `column`: the name of the first column.

    Raises:
      UserError: the prompt is not text. With `chat`, messages are allowed, too, but the template may refuse them.
    """
    if chat is not None:
        return record.values[0], chat.tokens_of(record)
    value = record.values[0]
    if isinstance(value, list | np.ndarray):
        raise UserError(
            f"{record.where}: column {column} holds {type(value).__name__}, not text; for lists of messages, "
            "give use_chat_template=true"
        )
    text = text_of(value, column, record)[0]
    return text, [*tokenizer.before_text, *tokenizer.encode(text)] if text else []
