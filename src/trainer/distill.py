"""`python -m trainer.distill [base.yml] teacher_path=FOLDER key=value ... [--show N]`: trains on a teacher's outputs.

The command works like `trainer.train`, or with use_sft=true like `trainer.sft`, but its objective also uses the
teacher. Checkpoints, meshes, supported combinations of keys, and reports are the same. With distill_rollouts=true, the
student generates the texts, as in `trainer.grpo`. With save_teacher_logits=FOLDER, the command saves the teacher's
logits instead of training; teacher_logits_path=FOLDER trains from saved logits.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from trainer import sft
from trainer.config.capabilities.chat_keys import SFT_DEFAULTS, not_conversations, other_command
from trainer.config.capabilities.distillation_keys import not_distilled
from trainer.config.capabilities.rl_keys import RL_DEFAULTS, not_prompts
from trainer.config.errors import UserError, command_line, exit_on_user_error, report
from trainer.config.help import question
from trainer.config.keys import Config
from trainer.config.load import Loaded, unchecked
from trainer.grpo import GRPO
from trainer.train import DRY_RUN, TRAIN, run_command

_DEFAULTS = {"use_distill": True}


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    words = command_line(argv)
    keys = [word for word in words if not word.startswith("--")]
    config = unchecked(keys, os.environ)
    shows = any(word.partition("=")[0] == sft.SHOW for word in words)
    if shows and not config.use_sft and not question(words):
        raise UserError(f"{sft.SHOW} shows conversations, but this command trains on documents; leave it out")
    kind = CONVERSATIONS if config.use_sft else ROLLOUTS if config.distill_rollouts else DOCUMENTS
    if config.save_teacher_logits:
        if shows or DRY_RUN in words:
            option = sft.SHOW if shows else DRY_RUN
            raise UserError(f"{option} is for training, which save_teacher_logits replaces; leave out one of them")
        run_command(words, dataclasses.replace(kind, instead=_save))
    elif kind is CONVERSATIONS:
        sft.run(words, kind, sft.show)
    else:
        run_command(words, kind)


def _save(run: Any, dataset: Any, say: Callable[[str], None]) -> None:
    from trainer.training.saved_logits import save_logits
    from trainer.training.start import other_arrays

    save_logits(run, dataset, lambda: other_arrays(run, None, say), say)


def _check_documents(config: Config) -> None:
    _check(config, "", [])


def _check_conversations(config: Config) -> None:
    _check(config, "use_sft", not_conversations(config))


def _check_rollouts(config: Config) -> None:
    _check(config, "", not_prompts(config))


def _check(config: Config, own: str, mistakes: list[str]) -> None:
    other = other_command(config, own, distills=True)
    if mistakes := [*mistakes, *not_distilled(config), *filter(None, [other])]:
        raise report(mistakes)


def _prepare_documents(loaded: Loaded, say: Callable[[str], None]) -> Mapping[str, Any]:
    from trainer.weights.teacher_files import keys_of_tokenizers

    return keys_of_tokenizers(loaded, say)


def _prepare_conversations(loaded: Loaded, say: Callable[[str], None]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    steps = [sft.prepare, _prepare_documents]
    if not loaded.config.load_parameters_path:  # a new student uses the teacher's tokenizer, which must be known first
        steps.reverse()
    for step in steps:
        found |= step(loaded, say)
        loaded.complete(found)
    return found


def _rounds(
    run: Any, dataset: Any, begin: Any, run_dir: Any, say: Callable[[str], None]
) -> AbstractContextManager[Any]:
    from trainer.rl.rounds import Rounds

    return Rounds(run, dataset, begin, run_dir, say)


DOCUMENTS = dataclasses.replace(
    TRAIN, command="distill", check=_check_documents, defaults=_DEFAULTS, prepare=_prepare_documents
)
CONVERSATIONS = dataclasses.replace(
    sft.SFT,
    command="distill",
    check=_check_conversations,
    defaults={**SFT_DEFAULTS, **_DEFAULTS},
    prepare=_prepare_conversations,
)
ROLLOUTS = dataclasses.replace(
    GRPO,
    command="distill",
    check=_check_rollouts,
    defaults={**RL_DEFAULTS, "use_grpo": False, **_DEFAULTS, "distill_alpha": 1.0},
    prepare=_prepare_conversations,
    source=_rounds,
)

if __name__ == "__main__":
    main()
