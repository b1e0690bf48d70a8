"""`python -m trainer.grpo [base.yml] key=value ...`: reinforcement learning from reward functions (GRPO).

The command works like `trainer.train` with a different source of batches. Checkpoints, meshes, supported combinations
of keys, and reports are the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trainer.config.capabilities.rl_keys import RL_DEFAULTS, not_prompts
from trainer.config.errors import command_line, exit_on_user_error
from trainer.config.keys import Config
from trainer.sft import check_kind, prepare, prompts
from trainer.train import Kind, run_command


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    run_command(command_line(argv), GRPO)


def _check(config: Config) -> None:
    check_kind(config, "use_grpo", not_prompts(config))


def _dataset(config: Config, say: Callable[[str], None]) -> Any:
    from trainer.rl.prompts import open_prompts
    from trainer.rl.room import check_rows

    check_rows(config)
    return open_prompts(config, say)


def _source(
    run: Any, dataset: Any, begin: Any, run_dir: Any, say: Callable[[str], None]
) -> AbstractContextManager[Any]:
    from trainer.rl.rollouts import Rollouts

    return Rollouts(run, dataset, begin, run_dir, say)


def _sample(config: Config, tokenizer: Any, say: Callable[[str], None]) -> Any:
    return prompts(config, tokenizer, say) if config.use_chat_template else None


GRPO = Kind("grpo", _check, RL_DEFAULTS, prepare, prompts=_sample, dataset=_dataset, source=_source)

if __name__ == "__main__":
    main()
