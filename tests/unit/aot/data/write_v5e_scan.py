"""Writes v5e_scan.hlo and v5e_scan_partitioned.hlo: three scanned blocks with splash attention and their gradient.

    python tests/unit/aot/data/write_v5e_scan.py        needs libtpu

They are compiled for four v5e chips with a mesh of data 2, fsdp 2. Kernel bodies, source lines and the compiler's own
settings are removed. Written on 2026-11-21 with libtpu 0.0.51.
"""

import os
import re
import tempfile
from pathlib import Path

os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.aot import dump

LAYERS, ROWS, LENGTH, HEADS, HEAD_DIM, WIDTH = 3, 4, 1024, 2, 128, 256
BLOCKS = splash.BlockSizes(
    block_q=256,
    block_kv=512,
    block_kv_compute=512,
    block_q_dkv=512,
    block_kv_dkv=256,
    block_kv_dkv_compute=256,
    block_q_dq=512,
    block_kv_dq=512,
)


def stripped(text: str) -> str:
    """Returns a module without source line tables, kernel bodies and settings that no test reads."""
    lines, table = [], False
    for line in text.splitlines():
        table = (table or line == "FileNames") and not line.startswith(("%", "ENTRY"))
        if table:
            continue
        if "custom_call_config" not in line:
            line = re.sub(r", backend_config=\{.*\}$", "", line)
        line = re.sub(r'"body":"[^"]*",', "", line)
        line = re.sub(r', metadata=\{op_name="([^"]*)"[^}]*\}', r', metadata={op_name="\1"}', line)
        line = re.sub(
            r', frontend_attributes=\{is_spmd_generated="true"\}|, operand_layout_constraints=\{.*?\}\}', "", line
        )
        if line.startswith("HloModule"):
            line = re.sub(r", (input_output_alias|entry_computation_layout)=.*", "", line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name="v5e:2x2",
        chip_config_name="default",
        chips_per_host_bounds=(2, 2, 1),
        num_slices=1,
    )
    mesh = Mesh(np.array(topology.devices).reshape(2, 2), ("data", "fsdp"))
    rows = PartitionSpec(("data", "fsdp"))

    def attention(x: jax.Array) -> jax.Array:
        mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
        kernel = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=BLOCKS)
        return jax.shard_map(jax.vmap(kernel), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(x, x, x)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            out = jnp.einsum("bhtd,chd->btc", attention(jnp.einsum("btc,chd->bhtd", x, w)), w)
            return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, rows)), None

        return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

    def abstract(shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = abstract((LAYERS, WIDTH, HEADS, HEAD_DIM), PartitionSpec(None, "fsdp"))
    lowered = jax.jit(jax.grad(loss), out_shardings=weights.sharding).lower(
        weights, abstract((ROWS, LENGTH, WIDTH), rows)
    )
    with tempfile.TemporaryDirectory() as folder:
        lowered.compile(compiler_options=dump.options(folder))
        texts = dump.read(folder)
    here = Path(__file__).parent
    (here / "v5e_scan.hlo").write_text(stripped(texts.optimized))
    (here / "v5e_scan_partitioned.hlo").write_text(stripped(texts.partitioned))


if __name__ == "__main__":
    main()
