"""`python -m trainer.dpo [base.yml] key=value ... [--show N]`: trains a language model to prefer one answer to another.

The command works like `trainer.train` with a different record encoder and objective. Checkpoints, meshes, supported
combinations of keys, and reports are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trainer.config.capabilities.preference_keys import DPO_DEFAULTS, not_pairs
from trainer.config.errors import command_line, exit_on_user_error
from trainer.config.keys import Config
from trainer.sft import check_kind, prepare, prompts, run
from trainer.train import Kind


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    run(command_line(argv), DPO, _show)


def _check(config: Config) -> None:
    check_kind(config, "use_dpo", not_pairs(config))


def _show(config: Config, count: int, say: Callable[[str], None]) -> None:
    from trainer.chat import show as chat_show

    chat_show.pairs(config, count, say)


def _encoder() -> Any:
    from trainer.chat.pairs import pair_encoder

    return pair_encoder


DPO = Kind("dpo", _check, DPO_DEFAULTS, prepare, _encoder, prompts)

if __name__ == "__main__":
    main()
