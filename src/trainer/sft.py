"""`python -m trainer.sft [base.yml] key=value ... [--show N]`: fine-tunes a language model on conversations.

It is `trainer.train` with a different record encoder. Everything else, such as checkpoints, meshes and reports, is the
same.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config.capabilities.chat_keys import SFT_DEFAULTS, not_conversations, other_command
from trainer.config.errors import UserError, command_line, exit_on_user_error, report
from trainer.config.help import question
from trainer.config.keys import Config
from trainer.config.load import Loaded, begin
from trainer.train import Kind, run_command

SHOW = "--show"


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    run(command_line(argv), SFT, show)


def run(words: Sequence[str], kind: Kind, shower: Callable[[Config, int, Callable[[str], None]], None]) -> None:
    """Trains or, if `words` (the command line) contains --show N, prints the first N records with `shower`.

    Raises:
      UserError: the command is invalid or cannot run.
    """
    words, count = _without_show(words)
    if count is None or question(words):
        run_command(words, kind)
        return
    begun = begin(words, os.environ, kind.defaults)
    kind.check(begun.config)
    if begun.config.prepared_path:
        raise UserError(
            f"{SHOW} cannot be combined with prepared_path; to show a row, use python -m trainer.inspect "
            f"{begun.config.prepared_path} row=0"
        )
    if begun.path:
        from trainer.weights.model_of_command import with_model

        loaded = with_model(begun)
    else:
        loaded = begun.end()
    kind.prepare(loaded, _say)
    shower(loaded.config, count, _say)


def _without_show(words: Sequence[str]) -> tuple[list[str], int | None]:
    """Returns a pair: the command line without `--show N`, and N (None if `--show` is not given)."""
    words, count = list(words), None
    for i, word in enumerate(words):
        option, equals, text = word.partition("=")
        if option == SHOW:
            given = [text] if equals else words[i + 1 : i + 2]
            if not given or not given[0].isdecimal() or not int(given[0]):
                raise UserError(f"{SHOW} needs a number of records, such as {SHOW} 3")
            return [*words[:i], *words[i + (1 if equals else 2) :]], int(given[0])
    return words, count


def check_kind(config: Config, own: str, mistakes: list[str]) -> None:
    """Raises UserError if a configuration is for another command, or if `mistakes`, a list of error messages, is not
    empty. `own`: the key that selects this command, such as use_sft."""
    if mistakes := [*mistakes, *filter(None, [other_command(config, own)])]:
        raise report(mistakes)


def _check(config: Config) -> None:
    check_kind(config, "use_sft", not_conversations(config))


def prepare(loaded: Loaded, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Sets these keys unless the user sets them: tokenizer_path (the tokenizer of the initial model), the columns of
    the data, and the row length. Returns the new values; see `prepare` in `train.Kind`.

    Raises:
      UserError: the model or the data cannot be read.
    """
    from trainer.chat.from_data import taken

    config = loaded.config
    found: dict[str, Any] = {}
    if not config.tokenizer_path and config.tokenizer_type != "bytes":
        from trainer.weights.open import open_source

        found["tokenizer_path"] = str(open_source(config.load_parameters_path, config.decoder_block).tokenizer)
        say(f"tokenizer_path={found['tokenizer_path']}: the tokenizer of load_parameters_path")
        loaded.complete(found)
    return {**found, **taken(loaded, say, own_run, positions)}


def own_run(config: Config) -> tuple[Mapping[str, Any], Any] | None:
    """Returns a pair for the run that this command continues: its keys, and its newest checkpoint. Returns None for a
    new run.

    Without run_name, also returns None if the initial model can be read: the configuration keys then come from the
    model and the data, as for a new run.
    """
    if not config.run_name and not config.load_parameters_path:
        return None
    from trainer.weights.model_of_command import own_run as of_command
    from trainer.weights.open import open_source

    if not config.run_name:
        try:
            open_source(config.load_parameters_path, config.decoder_block, verify=False)
            return None
        except UserError:
            pass
    return of_command(config, config.load_parameters_path)


def positions(config: Config) -> int | None:
    """Returns the context length for which the model at load_parameters_path was trained; None if the length is
    unknown."""
    from trainer.weights.open import open_source

    return open_source(config.load_parameters_path, config.decoder_block, verify=False).length


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def show(config: Config, count: int, say: Callable[[str], None]) -> None:
    """Prints the first `count` conversations and marks the text on which the model is trained."""
    from trainer.chat import show as chat_show

    chat_show.conversations(config, count, say)


def _encoder() -> Any:
    from trainer.chat.encoder import chat_encoder

    return chat_encoder


def prompts(config: Config, tokenizer: Any, say: Callable[[str], None]) -> Any:
    """Returns the encoder of the sample prompt; see `train.Kind`."""
    from trainer.chat.encoder import Prompts

    return Prompts(config, tokenizer, say)


SFT = Kind("sft", _check, SFT_DEFAULTS, prepare, _encoder, prompts)

if __name__ == "__main__":
    main()
