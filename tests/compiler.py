"""How XLA compiles what the suite runs: quickly.

At the lowest level of optimization, with XLA's older code generation for fusions and in one piece, a program compiles
in less than a third of the time. This changes little above code generation: not the HLO as JAX writes it, and so not
whether two programs are equal. The README's commands run at XLA's defaults.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

_LEVEL = "--xla_backend_optimization_level=0"
_CPU = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Simulated devices wait for each other in a collective: on a busy machine for longer than XLA's 40 seconds, after which
# it aborts the process.
_CPU += " --xla_cpu_collective_call_terminate_timeout_seconds=200"

# Options of `compile` where the bits of programs with another text are compared, or XLA's counts: the older code
# generation rounds equal mathematics in another fusion differently, and expands a scatter to a loop before it.
EXACT = {"xla_cpu_use_fusion_emitters": True}


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """What is compiled ahead of its first call within, a command's training step say, is compiled with EXACT."""
    import jax

    compile_ = jax.stages.Lowered.compile

    def compile_exact(self: Any, compiler_options: Any = None, **how: Any) -> Any:
        return compile_(self, EXACT | (compiler_options or {}), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_exact)
        yield


def start_xla(devices: int) -> None:
    """Starts it in this process. It reads its flags once; libtpu, which ends the process at a flag that it lacks, reads
    the variable when a test loads it."""
    import jax

    os.environ["XLA_FLAGS"] = xla_flags(devices)
    os.environ["NPROC"] = str(4 * devices)  # as trainer.runtime.platforms sets it
    jax.devices()
    os.environ["XLA_FLAGS"] = _shared(devices)


def xla_flags(devices: int) -> str:
    """XLA_FLAGS of a process with `devices` simulated ones, compiled as the suite's own programs are."""
    return f"{_shared(devices)} {_CPU}"


def _shared(devices: int) -> str:
    return f"--xla_force_host_platform_device_count={devices} {_LEVEL}"
