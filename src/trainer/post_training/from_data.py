"""What a run takes from its data where no key says it: the length of its rows, if it starts from a model."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.config import Config, Loaded, UserError
from trainer.config.derived import row_for
from trainer.config.rl_keys import ENABLE as RL
from trainer.config.words import counted
from trainer.data.cache import cache_root
from trainer.data.corpus import Corpus
from trainer.data.documents import Counts, Record
from trainer.data.prepare import open_tokenizer
from trainer.data.sources import open_source
from trainer.data.tokenizer import Tokenizer

LENGTH = "max_target_length"
EXAMINED = 2000  # records
LONGEST_ROW = 2048  # tokens of a conversation, or of a prompt and its completion; a pair has two sequences
COMPLETION = 512  # tokens of a completion for which a row has room beside the longest prompt
_CHUNK = 64  # records to encode at once
Say = Callable[[str], None]


def taken(loaded: Loaded, say: Say) -> Mapping[str, Any]:
    """Sets `max_target_length` of a run that starts from a model, if no key does, and returns it. `say` gets a line.

    It is that of the run's own checkpoint, if the run continues. Otherwise it is the longest of the first EXAMINED
    records, up to LONGEST_ROW and the positions of the model.

    Raises:
      UserError: the model or the data cannot be read, or the length contradicts other keys.
    """
    found: dict[str, Any] = {}
    if loaded.measures:
        length, why = _kept(loaded.config) or _measured(loaded.config)
        if length:
            say(f"{LENGTH}={length}: none is given, and {why}")
            found[LENGTH] = length
    loaded.complete(found)
    return found


def _kept(config: Config) -> tuple[int, str] | None:
    """Returns the length of the run that this command continues, and why; None if it continues none."""
    from trainer.checkpoint import open_source, own_run

    named = bool(config.run_name)
    if not named:
        try:
            open_source(config.load_parameters_path, config.decoder_block, verify=False)
            return None  # a run is continued if it has the same configuration
        except UserError:
            pass
    own = own_run(config, config.load_parameters_path)
    return own and (own[0][LENGTH], f"{own[1]} has it")


def _measured(config: Config) -> tuple[int, str]:
    """Returns the length that the data ask for, 0 without any, and why."""
    from trainer.checkpoint import open_source as open_model

    train, tokenizer = _opened(config)
    most = EXAMINED // len(train)
    lengths, whole = [], True
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
    if config[RL]:
        longest = max(longest, config.max_prefill_predict_length) + COMPLETION
        why += f", and a completion up to {COMPLETION}"
    model = open_model(config.load_parameters_path, config.decoder_block, verify=False)
    trained = [at for at in (model.length, config.trainable_position_size) if at and at > 0]
    limits = {LONGEST_ROW * (2 if config.use_dpo else 1): "the most that is taken from data"}
    limits |= dict.fromkeys(trained, "the positions of the model")
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
    """Returns what a record is, and a function that returns the tokens of each."""
    if config[RL]:
        from trainer.post_training.chat_encoder import Prompts
        from trainer.post_training.prompts import prompt_of

        chat = Prompts(config, tokenizer, today=False) if config.use_chat_template else None
        found = lambda records: (prompt_of(record, columns[0], tokenizer, chat)[1] for record in records)  # noqa: E731
        return "prompt", lambda records: (len(tokens) for tokens in found(records) if tokens)
    from trainer.post_training.chat_encoder import chat_encoder
    from trainer.post_training.pairs import pair_encoder

    encoder = (pair_encoder if config.use_dpo else chat_encoder)(config, tokenizer, columns, True)
    return encoder.noun, lambda records: encoder.lengths(records, Counts())
