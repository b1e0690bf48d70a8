"""`python -m trainer.prepare [base.yml] key=value ... out=FOLDER`: prepares the data of a run, in several processes.

The folder contains all the data that `trainer.train ... prepared_path=FOLDER` reads. After an interruption, the same
command continues.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.capabilities.token_keys import token_files
from trainer.config.dump import to_flow, to_yaml
from trainer.config.errors import UserError, closed_at_interrupt, command_line, exit_on_user_error, shortened
from trainer.config.help import prints_usage
from trainer.config.keys import Config
from trainer.config.load import Loaded, begin, unchecked
from trainer.config.paths import local_path
from trainer.config.prepared import CONFIG, DETERMINING, MANIFEST, keys_in
from trainer.config.words import counted, visible
from trainer.dpo import DPO
from trainer.runtime.folders import check_folder, replace_file
from trainer.runtime.lock import lock
from trainer.runtime.new_folder import not_a_new_folder
from trainer.runtime.platforms import leave_out_absent_tpu
from trainer.sft import SFT
from trainer.train import TRAIN, Kind

_OUT, _BEAM = "out=", "beam="


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    given = command_line(argv)
    words = [word for word in given if not word.startswith((_OUT, _BEAM))]
    if prints_usage("prepare", words):
        return
    outs = [word.removeprefix(_OUT) for word in given if word.startswith(_OUT)]
    beams = [word.removeprefix(_BEAM) for word in given if word.startswith(_BEAM)]
    if not outs or not outs[-1]:
        raise UserError("out=FOLDER is missing: give the folder to write; training reads it with prepared_path=FOLDER")
    if "://" in outs[-1]:
        raise UserError(f"{_OUT}{shortened(outs[-1])}: only a local folder can be written; copy it afterwards")
    place = local_path(outs[-1], _OUT).absolute()
    loaded, kind = _loaded(words)
    for line in (*loaded.notes, *loaded.warnings):
        _say(line)
    kind.prepare(loaded, _say)
    _begin(place, loaded.config)
    ended: list[str] = []
    with closed_at_interrupt(lambda: ended or _say("the same command continues")):  # type: ignore[func-returns-value]
        try:
            line = _prepare(loaded.config, place, kind, beams[-1] if beams else None)
        finally:
            ended.append("also after an error")
    print(visible(line))
    print(f"train on it: python -m trainer.{kind.command} base.yml prepared_path={visible(outs[-1])} ...")


def _loaded(words: Sequence[str]) -> tuple[Loaded, Kind]:
    """Returns the loaded configuration, and the kind of training command that will read the prepared rows.

    Raises:
      UserError: the configuration has no rows to prepare.
    """
    config = unchecked(words, os.environ)
    kind = SFT if config.use_sft else DPO if config.use_dpo else TRAIN
    problem = None
    if config.prepared_path:
        problem = f"prepared_path={shortened(config.prepared_path)}: its data are already prepared; leave it out"
    elif config.use_grpo:
        problem = "use_grpo=true: trainer.grpo reads its prompts directly; there is nothing to prepare"
    elif config.data_pipeline == "streaming":
        problem = "data_pipeline=streaming tokenizes during training; leave it out"
    elif config.dataset_type == "synthetic":
        problem = "dataset_type=synthetic computes its rows; there is nothing to prepare"
    elif token_files(config):
        problem = f"grain_file_type={config.grain_file_type}: training reads these files without preparation"
    if problem:
        raise UserError(problem)
    begun = begin(words, os.environ, kind.defaults)
    kind.check(begun.config)
    if not begun.path:
        return begun.end(), kind
    leave_out_absent_tpu()
    from trainer.weights.model_of_command import with_model

    return with_model(begun), kind


def _begin(place: Path, config: Config) -> None:
    """Writes `config` to a new folder, or compares it with the configuration that an earlier command wrote there."""
    if (place / CONFIG).is_file():
        check_folder(place)
        if not any(path.is_dir() for path in place.iterdir()):  # the earlier command failed before it prepared anything
            with _written(place):
                replace_file(place / CONFIG, to_yaml(config))
        saved = keys_in(place)
        for name in (*METHODS, *DETERMINING, "tokenizer_path", "vocab_size"):
            if to_flow(saved[name]) != to_flow(config[name]):
                raise UserError(
                    f"{place} has data prepared with {name}={shortened(to_flow(saved[name]))}, and this command has "
                    f"{shortened(to_flow(config[name]))}: choose another folder, or remove this one"
                )
        return
    if problem := not_a_new_folder(place):
        raise UserError(f"{_OUT}{place}: {problem}")
    with _written(place):
        place.mkdir(parents=True, exist_ok=True)
        replace_file(place / CONFIG, to_yaml(config))


@contextlib.contextmanager
def _written(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{_OUT}{place}: cannot be written: {error.strerror or error}") from error


def _prepare(config: Config, place: Path, kind: Kind, beam: str | None) -> str:
    """Prepares the rows in the folder `place`, and returns a line about the rows."""
    from trainer.data.dataset import text_encoder
    from trainer.data.opened import open_documents
    from trainer.data.prepared import read_place, write_place

    with _written(place):
        held = lock(place)
    if held is None:
        raise UserError(f"{_OUT}{place}: another process prepares data in this folder")
    with held:
        opened = open_documents(config, place, _say, kind.encoder() if kind.encoder else text_encoder, beam)
        prepared = opened.prepare(_say)
        if (place / MANIFEST).is_file():
            then, _ = read_place(place)
            if then.identity != prepared.identity:
                raise UserError(f"{place} has rows of other documents: the files have changed; choose another folder")
            evaluation = prepared.evaluation or then.evaluation  # eval_interval=-1 prepares no evaluation
            prepared = dataclasses.replace(prepared, evaluation=evaluation)
        with _written(place):
            write_place(place, prepared, opened.tokenizer, config)
            for path in [*place.glob("*-*.lock"), *place.glob("*-*.tmp")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    sizes = " + ".join(counted(one.source.size, "row") for one in prepared.train)
    tokens = sum(one.meta["tokens"] for one in prepared.train)
    held_out = f"; held out {counted(prepared.evaluation.source.size, 'row')}" if prepared.evaluation else ""
    return f"{place}: {sizes} of {config.max_target_length} tokens, {counted(tokens, 'trained token')}{held_out}"


def _say(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
