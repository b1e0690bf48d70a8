"""Writes two_hosts_jaxN.hlo.gz: the optimized training step of a small model for two hosts of four H100.

    python tests/unit/aot/data/write_gpu.py        needs the extra gpu-aot; run it with JAX 0.10 and with JAX 0.12

The model has three layers with cuDNN's attention of up to four documents in a row. The mesh is data 2 over hosts,
fsdp 2, tensor 2. Source lines, layouts and the compiler's own settings are removed. Written on 2026-11-29 with JAX
0.10.2 and 0.12.0.1, cuDNN 9.28.
"""

import gzip
import re
import tempfile
from pathlib import Path

from trainer.config.load import load
from trainer.runtime.platforms import prepare_to_compile

WORDS = """
base.yml dataset_type=synthetic decoder_block=llama2 base_emb_dim=256 base_mlp_dim=512 base_num_query_heads=4
base_num_kv_heads=2 head_dim=64 vocab_size=512 max_target_length=256 base_num_decoder_layers=3 dtype=bfloat16
remat_policy=full attention=cudnn_flash_jax per_device_batch_size=2 compile_topology=h100-4
compile_topology_num_slices=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2
"""
_KEPT = re.compile(r'"(?:known_trip_count|cudnn_fmha_backend_config|gemm_backend_config)"')


def stripped(text: str) -> str:
    """Returns a module without source line tables, layouts and settings that no test reads."""
    lines, table = [], False
    for line in text.splitlines():
        table = (table or line == "FileNames") and not line.startswith(("%", "ENTRY"))
        if table:
            continue
        if not _KEPT.search(line):
            line = re.sub(r", backend_config=\{.*\}$", "", line)
        line = re.sub(r', metadata=\{op_name="([^"]*)"[^}]*\}', r', metadata={op_name="\1"}', line)
        line = re.sub(r", metadata=\{(?!op_name)[^}]*\}", "", line)
        line = re.sub(r", frontend_attributes=\{[^}]*\}|, operand_layout_constraints=\{.*?\}\}", "", line)
        line = re.sub(r"(\[[\d,]*\])\{[\d,]*\}", r"\1", line)
        if line.startswith("HloModule"):
            line = line.partition(",")[0]
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    config = load(WORDS.split()).config
    prepare_to_compile(config.compile_topology)
    import jax

    from trainer.aot import dump
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.training.build import build

    run = build(config, devices_of(topology_of(config), config.compile_topology_num_slices))
    with tempfile.TemporaryDirectory() as folder, dump.uncached():
        run.step.lower(*run.abstract_args()).compile(dump.options(folder))
        text = stripped(dump.read(folder).optimized)
    name = f"two_hosts_jax{jax.__version_info__[1]}.hlo.gz"
    (Path(__file__).parent / name).write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
