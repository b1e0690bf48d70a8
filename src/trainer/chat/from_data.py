"""Chooses settings to suit the data, unless the configuration gives them.

The settings are the columns and, for a run that starts from a model, the row length.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from trainer.config.capabilities.chat_keys import METHODS, TOOLS
from trainer.config.capabilities.rl_keys import NOT_COLUMNS
from trainer.config.derived import has_rollouts, rollouts_share, row_for
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import Loaded
from trainer.config.words import counted
from trainer.data.cache import cache_root
from trainer.data.corpus import Corpus
from trainer.data.documents import Counts, Record
from trainer.data.prepare import open_tokenizer
from trainer.data.readers import NoColumn
from trainer.data.sources import open_source
from trainer.data.tokenizer import Tokenizer

LENGTH = "max_target_length"
EXAMINED = 2000  # the number of records that determine the row length
LONGEST_ROW = 2048  # tokens of one sequence; a row of pairs has twice this length
COLUMNS = ("train_data_columns", "eval_data_columns")
# The usual sets of columns for each command, by the key that selects the command. The first set that exists in the data
# is used. Every command with rollouts uses the sets of use_grpo.
CONVENTIONS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "use_sft": (("messages",), ("prompt", "completion")),
    "use_dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "use_grpo": (("prompt",), ("messages",)),
}
COMPLETION = 512  # tokens that a row reserves for a completion, after the longest prompt
_CHUNK = 64  # records to encode at once
Say = Callable[[str], None]


def taken(
    loaded: Loaded,
    say: Say,
    own_run: Callable[[Config], tuple[Mapping[str, Any], Any] | None],
    positions: Callable[[Config], int | None],
) -> Mapping[str, Any]:
    """Sets the columns and, for a run that starts from a model, `max_target_length`, unless the configuration gives
    them.

    Returns the new values. A resumed run uses the values in its checkpoint. Otherwise, the columns are the first set in
    CONVENTIONS that exists in the data. `max_target_length` is chosen so that the longest of the first EXAMINED records
    fits into a row, but it is at most LONGEST_ROW (twice LONGEST_ROW for pairs) and at most the model's number of
    positions.

    Args:
      say: called with a message for each new value.
      own_run: returns the configuration and the checkpoint of the run that the command resumes; None if the command
        does not resume a run.
      positions: returns the number of positions with which the model at load_parameters_path was trained; None if
        unknown.

    Raises:
      UserError: the model or the data cannot be read, the data have none of the usual columns, or the length
        contradicts other keys.
    """
    config = loaded.config
    by_function = config.formatting_func_path and not has_rollouts(config)
    columns = [name for name in COLUMNS if loaded.unset(name)] if loaded.unset(COLUMNS[0]) and not by_function else []
    wanted = [*columns, *([LENGTH] if loaded.measures else [])]
    found: dict[str, Any] = {}
    if wanted and (own := own_run(config)):
        saved, checkpoint = own
        found = {name: saved[name] for name in wanted if [saved[name]] != [config[name]]}
        if found:
            say(f"{' '.join(as_words(found))} (not given): as in {checkpoint}")
        loaded.complete(found)
        return found
    if columns and (there := _conventional(config)) and there != [*config[COLUMNS[0]]]:
        found = dict.fromkeys(columns, there)
        loaded.complete(found)
        say(f"{COLUMNS[0]}=[{','.join(there)}] (not given): the data have these columns")
    if loaded.measures:
        length, why = _measured(config, positions)
        if length:
            found[LENGTH] = length
            say(f"{LENGTH}={length} (not given): {why}")
            loaded.complete(found)
    return found


def _conventional(config: Config) -> list[str]:
    """Returns the first usual set of columns that exists in the data; [] if the data have only the default column.

    Raises:
      UserError: the data have neither the usual columns nor the default column.
    """
    there: Sequence[str] = ()
    try:
        source = open_source(ConfigDict({**config, COLUMNS[0]: ["\0"]}))
        next(source.train[0].records(), None)
    except NoColumn as error:
        there = error.there
    method = "use_grpo" if has_rollouts(config) else next(key for key in METHODS if config[key])
    for names in CONVENTIONS[method]:
        if not {*names} <= {*there} or (
            method == "use_grpo" and names == ("messages",) and not config.use_chat_template
        ):
            continue
        if rollouts_share(config) < 1:
            others = ["completion"]
        else:
            others = [TOOLS] if method != "use_grpo" else [name for name in there if name not in (*names, *NOT_COLUMNS)]
        return [*names, *(name for name in others if name in there)]
    if there and not {*config[COLUMNS[0]]} <= {*there}:
        usual = ", or ".join(" and ".join(names) for names in CONVENTIONS[method])
        raise UserError(
            f"{COLUMNS[0]} is not given, and the data have none of the usual columns: {usual}"
            f"{' with use_chat_template=true' if method == 'use_grpo' else ''}; set it to some of: {', '.join(there)}"
        )
    return []


def _measured(config: Config, positions: Callable[[Config], int | None]) -> tuple[int, str]:
    """Returns the row length that the data require, and the reason for it; (0, "") if the data have no records."""
    train, tokenizer = _opened(config)
    most = max(1, EXAMINED // len(train))
    lengths: list[int] = []
    whole = True
    what, of_records = _lengths(config, tokenizer, train[0].columns)
    for corpus in train:
        records = corpus.records()
        first = itertools.islice(records, most)
        while chunk := list(itertools.islice(first, _CHUNK)):
            lengths += of_records(chunk)
        whole &= next(records, None) is None
    if not lengths:
        return 0, ""
    longest = max(lengths)
    why = f"the longest of {'' if whole else 'the first '}{counted(len(lengths), what)} has {longest:,} tokens"
    if has_rollouts(config):
        longest = max(longest, config.max_prefill_predict_length) + COMPLETION
        why += f", and {COMPLETION} more are reserved for a completion"
    trained = [at for at in (positions(config), config.trainable_position_size) if at and at > 0]
    limits = {LONGEST_ROW * (2 if config.use_dpo else 1): "the limit for a length from data"}
    limits |= dict.fromkeys(trained, "the model's number of positions")
    if longest <= min(limits):
        return min(row_for(longest), *limits), why
    return min(limits), f"{why}, more than {limits[min(limits)]}"


def _opened(config: Config) -> tuple[Sequence[Corpus], Tokenizer]:
    source = open_source(config)
    root = cache_root(config.data_cache_directory)
    tokenizer = open_tokenizer(config, source.train, source.weights, root, lambda line: None)
    assert tokenizer is not None
    return source.train, tokenizer


def _lengths(
    config: Config, tokenizer: Tokenizer, columns: tuple[str, ...]
) -> tuple[str, Callable[[Sequence[Record]], Iterator[int]]]:
    """Returns what a progress message calls a record, such as "prompt", and a function that yields the number of tokens
    of each record."""
    if has_rollouts(config):
        from trainer.chat.encoder import Prompts, prompt_of

        chat = Prompts(config, tokenizer, today=False) if config.use_chat_template else None
        found = lambda records: (prompt_of(record, columns[0], tokenizer, chat)[1] for record in records)  # noqa: E731
        return "prompt", lambda records: (len(tokens) for tokens in found(records) if tokens)
    from trainer.chat.encoder import chat_encoder
    from trainer.chat.pairs import pair_encoder

    encoder = (pair_encoder if config.use_dpo else chat_encoder)(config, tokenizer, columns, True)
    return encoder.noun, lambda records: encoder.lengths(records, Counts())
