"""Compiler options of the suite, chosen for short compile times.

A program compiles in less than a third of the time at the lowest optimization level, in one piece and, where XLA still
has it, with the older code generation for fusions. This changes little above code generation. It does not change the
HLO that JAX writes, and therefore not whether two programs are equal. The README's commands run with XLA's defaults.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import pytest

_LEVEL = "--xla_backend_optimization_level=0"
# jaxlib 0.10 still has the older code generation for fusions. XLA aborts the process if it does not know a flag.
_HAS_OLDER = metadata.version("jaxlib").startswith("0.10.")
_CPU = f"{'--xla_cpu_use_fusion_emitters=false ' if _HAS_OLDER else ''}--xla_cpu_parallel_codegen_split_count=1"
# Simulated devices wait for each other in a collective. On a busy machine this can exceed XLA's limit of 40 seconds, at
# which it aborts the process.
_CPU += " --xla_cpu_collective_call_terminate_timeout_seconds=200"
# All these options as XLA_FLAGS, for a process with any number of devices.
QUICKLY = f"{_LEVEL} {_CPU}"

# XLA_FLAGS for a process that compares bits of programs with different texts; see EXACT.
QUICKLY_EXACT = f"{_LEVEL} --xla_cpu_parallel_codegen_split_count=1"

# The caller's XLA_FLAGS that are kept, such as --xla_cpu_max_isa=AVX2: programs round differently on other processors.
_GIVEN = " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith("--xla_cpu_max_isa"))

# Options of `compile` for tests that compare bits of programs with different texts, or XLA's counts. The older code
# generation rounds equal math differently in different fusions, and it first expands a scatter to a loop.
EXACT = {"xla_cpu_use_fusion_emitters": True} if _HAS_OLDER else {}

# Options of `compile` that make TPU programs compile faster. Later versions have optimization_level=O1 instead, but its
# programs all-gather in float32 and use more memory than a user's.
TPU_QUICKLY = {"exec_time_optimization_effort": -1.0} if _HAS_OLDER else {}

# A tiny model and a topology, with kernels for TPUs.
TINY_TPU = {
    "compile_topology": "v5e-4",
    "ici_fsdp_parallelism": 4,
    "per_device_batch_size": 1,
    "base_emb_dim": 256,
    "head_dim": 128,
    "base_mlp_dim": 512,
    "base_num_decoder_layers": 3,
    "max_target_length": 256,
    "attention": "flash",
    "remat_policy": "full",
}
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="there is no libtpu but for Linux on x86-64"
)

# Called with each program (an MLIR module) that XLA compiles or that may come from the compilation cache.
OBSERVERS: list[Callable[[Any], None]] = []


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Compiles with EXACT everything inside that is compiled ahead of its first call, such as a command's training
    step."""
    import jax

    compile_ = jax.stages.Lowered.compile

    def compile_exact(self: Any, compiler_options: Any = None, **how: Any) -> Any:
        return compile_(self, EXACT | (compiler_options or {}), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile_exact)
        yield


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Compiles everything inside without optimizations. Equal math then has equal bits, and compiling is faster than
    with EXACT."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def start_xla(devices: int) -> None:
    """Starts XLA in this process. XLA reads its flags only once; the variable is then reset because libtpu reads it
    when a test loads it, and aborts the process if it does not know a flag."""
    import jax

    _compile_anew_for_several_devices()

    os.environ["XLA_FLAGS"] = xla_flags(devices)
    os.environ["NPROC"] = str(4 * devices)  # the same value as in trainer.runtime.platforms
    jax.devices()
    os.environ["XLA_FLAGS"] = _shared(devices)


def _compile_anew_for_several_devices() -> None:
    """Keeps programs for several devices out of JAX's compilation cache, for the reason given in
    `trainer.runtime.programs`. That module disables the cache for a whole process, but most of the suite's programs
    have one device. Also passes every program to OBSERVERS."""
    from jax._src import compiler

    cached = compiler.compile_or_get_cached

    def compile_(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any, of: Any, *rest: Any) -> Any:
        for observe in OBSERVERS:
            observe(module)
        if devices.size > 1:
            return compiler.backend_compile_and_load(backend, module, of, options, callbacks)
        return cached(backend, module, devices, options, callbacks, of, *rest)

    compiler.compile_or_get_cached = compile_


def xla_flags(devices: int) -> str:
    """Returns XLA_FLAGS for a process with `devices` simulated devices, compiled like the suite's own programs."""
    return f"{_shared(devices)} {_CPU}"


def _shared(devices: int) -> str:
    return f"{_GIVEN} --xla_force_host_platform_device_count={devices} {_LEVEL}".lstrip()
