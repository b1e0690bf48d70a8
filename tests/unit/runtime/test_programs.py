"""Programs for several CPU devices are always compiled; other programs come from JAX's cache."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.aot import executable
from trainer.config.errors import UserError

# Compiles a program twice on the devices of a mesh, and prints how often it came from the cache.
TWICE = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.sharding.mesh import make_mesh

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
count = jax.device_count()
config = resolve(load(["base.yml"]).config, device_count=count, platform="cpu", num_slices=None)
placed = NamedSharding(make_mesh(config, jax.devices()), PartitionSpec("fsdp"))
for _ in range(2):
    jax.clear_caches()
    jax.jit(lambda x: x + 1, in_shardings=placed).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
print(len(hits))
"""


@pytest.mark.parametrize(("devices", "hits", "said"), [(1, "1", 0), (4, "0", 1)])
def test_a_mesh_of_several_cpus_disables_the_cache(tmp_path, devices, hits, said):
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run([sys.executable, "-c", TWICE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hits
    assert done.stderr.count("JAX_COMPILATION_CACHE_DIR is not used: ") == said


@pytest.mark.parametrize(("count", "hits"), [(1, 1), (8, 0)])
def test_the_suite_shares_programs_of_one_device(count, hits):
    """With cached multi-device programs, ring attention returned wrong values from the second run on."""
    heard = []

    def hear(event, **_):
        heard.append(event)

    placed = NamedSharding(Mesh(np.array(jax.devices()[:count]), "x"), PartitionSpec("x"))
    jax.monitoring.register_event_listener(hear)
    try:
        for _ in range(2):
            heard.clear()
            jax.jit(lambda x: x * 3 + count, in_shardings=placed)(np.arange(8.0))
    finally:
        jax.monitoring.unregister_event_listener(hear)
    assert heard.count("/jax/compilation_cache/cache_hits") == hits


def test_a_step_with_permutes_is_not_saved_for_several_cpus(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]), "x")
    shift = [(k, (k + 1) % 4) for k in range(4)]

    def saved(one, kind="cpu"):
        mapped = jax.shard_map(one, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
        step = jax.jit(lambda x: (mapped(x), {"loss": x}))
        compiled = step.lower(jax.ShapeDtypeStruct((8,), "float32")).compile()
        executable.save(tmp_path / "step", compiled, {"devices": {"kind": kind, "number": 4}})

    with pytest.raises(UserError, match=r"step: this step passes arrays .* several CPU devices; leave the key out"):
        saved(lambda x: jax.lax.ppermute(x, "x", shift))
    saved(lambda x: x + jax.lax.axis_index("x"))
    saved(lambda x: jax.lax.ppermute(x, "x", shift), "TPU v5e")
