"""A compiled step shared by the tests of this folder."""

from typing import Any, NamedTuple

import pytest
from compiler import EXACT
from support import tiny_config

from trainer.aot import dump


class Step(NamedTuple):
    run: Any
    compiled: Any
    texts: dump.Dump


@pytest.fixture(scope="session")
def step(tmp_path_factory) -> Step:
    """The tiny model's step on eight CPU devices, data 2 x fsdp 4: three scanned layers, rematerialized."""
    import jax

    from trainer.training.build import build

    sizes = {"base_num_decoder_layers": 3, "remat_policy": "full", "ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}
    run = build(tiny_config("nnx", devices=8, logits_via_embedding=False, **sizes), jax.devices())
    folder = tmp_path_factory.mktemp("dump")
    options = dump.options(folder) | EXACT
    jax.config.update("jax_traceback_in_locations_limit", 10)  # JAX's default: reports name source lines
    with dump.uncached():
        compiled = run.step.lower(*run.abstract_args()).compile(compiler_options=options)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    return Step(run, compiled, dump.read(folder))
