"""Lets the runs and engines of one test file share equal programs, just as calls of one `jax.jit` share them.

Half of a command's CPU time in a test goes into tracing and lowering a training step, an initial state, an evaluation
and the generation programs. A test file that runs one model again and again, to resume it, read it or refuse a key,
turns on sharing with `pytestmark = pytest.mark.usefixtures("equal_programs")`. Do not use it in a file whose tests
replace code that is traced into programs. Only functions are shared: each run has its own state, files and compiled
step.
"""

import contextlib
from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

# Keys that name a run, its data, its length or its output. They do not affect any program.
OF_A_RUN = {
    *("run_name", "base_output_directory", "steps", "num_batches", "prompt", "enable_tensorboard", "metrics_file"),
    *("enable_checkpointing", "checkpoint_period", "save_checkpoint_on_start", "max_num_checkpoints_to_keep"),
    *("keep_best_checkpoints", "keep_best_metric", "load_parameters_path", "lora_restore_path"),
    *("eval_interval", "eval_steps", "eval_tasks", "eval_tasks_interval", "abort_on_eval_tasks_error"),
    *("tokenizer_path", "tokenizer_type", "train_data_columns", "eval_data_columns", "data_cache_directory"),
    *("grain_file_type", "grain_train_files", "grain_eval_files", "held_out_share", "data_pipeline"),
    *("reward_functions", "reward_num_workers", "reward_worker_timeout_seconds"),
}
# Values that an engine passes to its programs as arguments.
OF_A_REQUEST = {f"decode_sampling_{name}" for name in ("strategy", "top_k", "nucleus_p", "seed", "temperature")}


@contextlib.contextmanager
def sharing_programs() -> Iterator[dict[Any, Any]]:
    """Within this context, `training.build` and `Engine` reuse the functions of the first run or engine whose keys are
    equal, ignoring OF_A_RUN. Yields the cache: a test that replaces code clears it before and after."""
    from trainer.config.resolve import resolve
    from trainer.inference.engine import Engine
    from trainer.sharding import hardware
    from trainer.training import build as module

    build_anew, engine_anew = module.build, Engine.__init__
    kept: dict[Any, Any] = {}

    def build(config: Any, devices: Any, *rules_and_objective: Any) -> Any:
        config = resolve(config, **hardware(devices))
        key = _program(config), tuple(devices), rules_and_objective
        if key not in kept:
            kept[key] = build_anew(config, devices, *rules_and_objective)
        return kept[key]._replace(config=config)

    def engine(self: Any, served: Any) -> None:
        ranks = None if served.ranks is None else served.ranks.tobytes()
        own = OF_A_REQUEST if not served.config.return_log_prob else set()
        key = _program(served.config, own), served.mesh, str(served.rules), served.slots, ranks, served.controls
        if key not in kept:
            engine_anew(self, served)
            kept[key] = dict(self.__dict__)
        self.__dict__ = kept[key] | self.__dict__ | {"served": served, "config": served.config}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "build", build)
        patch.setattr(Engine, "__init__", engine)
        yield kept


def _program(config: Mapping[str, Any], more: Set[str] = frozenset()) -> tuple[tuple[str, str], ...]:
    """Returns the keys that affect programs, without those in `more`. `steps` counts with DiLoCo, whose last step
    synchronizes the islands."""
    own = more | (OF_A_RUN - {"steps"} if config["enable_diloco"] else OF_A_RUN)
    return tuple((name, str(value)) for name, value in config.items() if name not in own)


@pytest.fixture(scope="module")
def equal_programs() -> Iterator[dict[Any, Any]]:
    """See `sharing_programs`."""
    with sharing_programs() as kept:
        yield kept
