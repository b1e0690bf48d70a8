"""The data set of prompts for runs with rollouts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.chat.encoder import Prompts, answer_of, prompt_of
from trainer.config.derived import rollouts_share, row_for
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.words import counted
from trainer.data.cache import cache_root
from trainer.data.corpus import Corpus
from trainer.data.dataset import Dataset, Epoch, Say
from trainer.data.prepare import open_tokenizer
from trainer.data.sources import open_source
from trainer.data.streams import PreparedStream, fingerprint
from trainer.data.tokenizer import Tokenizer
from trainer.inference.ends import stop_tokens
from trainer.inference.served import longest_prompt

_FORMAT = 1  # incremented whenever a code change makes the same records result in different prompts
INDEX = "prompt"  # the batch field with the indices of the prompts, [n]


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
      where: `str(where)` is the record's location; computing it reads the file up to that record.
      text: the value of the prompt column: a text, or a list of messages.
      columns: the values of the other columns by name, which are passed to reward functions.
      tokens: the tokens of the prompt, int32 [n].
      completion: the tokens of the completion in the record's second column, int32; empty if all rounds sample
        completions.
    """

    where: Any
    text: Any
    columns: Mapping[str, Any]
    tokens: np.ndarray
    completion: np.ndarray


@dataclasses.dataclass(frozen=True)
class PromptRows:
    """A `data.RowSource` whose rows are the indices of prompts."""

    prompts: Sequence[Prompt]
    length: int

    @property
    def size(self) -> int:
        """The number of prompts."""
        return len(self.prompts)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a batch with one field, INDEX: the `indices` as int32."""
        return {INDEX: indices.astype(np.int32)}


@dataclasses.dataclass(frozen=True)
class PromptDataset(Dataset):
    """A `Dataset` whose batches are indices of prompts.

    Attributes:
      train, held_out: the training and the evaluation prompts; `held_out` is None without evaluation.
      stop: the tokens that end a completion; with use_chat_template=true, also the tokens that end an assistant turn.
    """

    train: PromptRows = dataclasses.field(kw_only=True)
    held_out: PromptRows | None = dataclasses.field(kw_only=True)
    stop: Sequence[int] = dataclasses.field(kw_only=True)


def open_prompts(config: Config, say: Say) -> PromptDataset:
    """Reads the prompts from the files that `config` specifies. All prompts are kept in memory.

    Args:
      config: a resolved configuration.
      say: gets messages, for example about prompts that are left out.

    Raises:
      UserError: files are missing or unreadable, a prompt is neither text nor messages, or no usable prompt remains.
    """
    source = open_source(config, say)
    if len(source.train) > 1:
        raise UserError(
            f"{source.name}: prompts must come from one file pattern, not from a mixture; put the files of the mixture "
            "into one folder"
        )
    root = cache_root(config.data_cache_directory)
    tokenizer = open_tokenizer(config, source.train, source.weights, root, say)
    assert tokenizer is not None
    chat = Prompts(config, tokenizer, today=False) if config.use_chat_template else None
    train = _prompts(config, source.train, tokenizer, chat, say)
    held_out = None
    if config.eval_interval > 0:
        if not source.evaluation:
            raise UserError(
                f"eval_interval={config.eval_interval}, but there are no prompts to evaluate on: set their files or "
                "split, a held_out_share, or eval_interval=-1"
            )
        held_out = _prompts(config, source.evaluation, tokenizer, chat, say)
    order: dict[str, Any] = {"seed": config.data_shuffle_seed, "shuffle": config.enable_data_shuffling}
    open_stream = functools.partial(PreparedStream, train, **order)
    stop = [*stop_tokens(config, tokenizer), *(chat.stop_tokens() if chat else ())]
    of_tokens = {
        "tokenizer": tokenizer.fingerprint,
        "template": chat and chat.template.text,
        "ends": [tokenizer.before_text, stop],
    }
    identity = {
        "format": _FORMAT,
        "way": "prompts",
        "documents": fingerprint({"corpora": [corpus.identity for corpus in source.train]}),
        "tokenizer": fingerprint(of_tokens),
        "length": longest_prompt(config),
        "order": f"seed {order['seed']}" if order["shuffle"] else "that of the files",
    }
    summary = f"{source.name}: {counted(train.size, 'prompt')}"
    summary += f", {held_out.size:,} held out" if held_out else ", no evaluation"
    if not any(token < config.vocab_size for token in stop):
        say("the tokenizer has no token that ends a completion, so every completion runs to its length limit")
    if chat is None and (template := tokenizer.chat_template):
        say(f"{template.where} has a chat template, which is not applied; use_chat_template=true applies it")
    fields: dict[str, Any] = {"train": train, "held_out": held_out, "stop": stop}
    fields["epoch"] = Epoch(train.size, counted(train.size, "prompt"))
    return PromptDataset(held_out, tokenizer, identity, summary, open_stream, **fields)


def _prompts(
    config: Config, corpora: Sequence[Corpus], tokenizer: Tokenizer, chat: Prompts | None, say: Say
) -> PromptRows:
    longest = longest_prompt(config)
    prompts: list[Prompt] = []
    long: list[tuple[int, Any]] = []
    empty, unanswered = list[Any](), list[Any]()
    mixed = rollouts_share(config) < 1
    for corpus in corpora:
        name, *others = corpus.columns
        if mixed and not others:
            raise UserError(
                f"distill_rollouts_share={rollouts_share(config)}: the rounds without rollouts need completions "
                "from the data; name their column, as in train_data_columns=[prompt,answer] "
                "eval_data_columns=[prompt,answer]"
            )
        for record in corpus.records():
            value, tokens = prompt_of(record, name, tokenizer, chat)
            completion = answer_of(record, others[0], tokenizer, chat) if mixed else []
            if not tokens:
                empty.append(record.where)
            elif mixed and not completion:
                unanswered.append(record.where)
            elif len(tokens) > longest:
                long.append((len(tokens), record.where))
            else:
                columns = {other: _plain(found) for other, found in zip(others, record.values[1:], strict=True)}
                arrays = (np.asarray(found, np.int32) for found in (tokens, completion))
                prompts.append(Prompt(record.where, _plain(value), columns, *arrays))
    label = corpora[0].label
    if long:
        say(
            f"{label}: {counted(len(long), 'prompt')} with more than {longest} tokens left out, the first in "
            f"{long[0][1]} (max_prefill_predict_length, max_target_length)"
        )
    if empty:
        say(f"{label}: {counted(len(empty), 'prompt')} without text left out, the first in {empty[0]}")
    if unanswered:
        say(f"{label}: {counted(len(unanswered), 'prompt')} without completion left out, the first in {unanswered[0]}")
    if not prompts:
        raise UserError(f"{label}: no prompt is left: {_why_none(config, long, len(empty) + len(unanswered))}")
    return PromptRows(prompts, config.max_target_length)


def _why_none(config: Config, long: Sequence[tuple[int, Any]], empty: int) -> str:
    """Returns why no prompt remains and, if prompts are too long, a fix. `long`: (number of tokens, location) of each
    prompt that is too long. `empty`: the number of prompts left out because their text or completion is empty."""
    if not long:
        return f"{counted(empty, 'prompt')} without text or completion"
    most, limit = max(tokens for tokens, _ in long), longest_prompt(config)
    keys = [f"max_target_length={row_for(most + 1)}"] if most >= config.max_target_length else []
    if 0 <= config.max_prefill_predict_length < most:
        keys = [f"max_prefill_predict_length={most}", *keys]
    many = f"{len(long):,} of {len(long) + empty:,}" if empty else f"all {len(long):,}"
    return f"{many} have more than {limit} tokens (longest {most:,}); give {' '.join(keys)}"


def _plain(value: Any) -> Any:
    """Converts a value read from a file to plain Python: UTF-8 bytes to text, arrays to lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value
