"""Compares the bounds of `trainer.planning.bounds` with compiled steps of random small configurations.

    python scripts/check_plan_bounds.py --points 300 --seed 0 --topology cpu-8 [--topology v5e-4 ...] [--results FILE]

A point is a preset with small sizes and random settings. Each bound must be at most the figure of the compiled step,
and the bounds must not refuse a point that compiles. trainer.aot.chips has no figures of a CPU. For CPU devices, the
script therefore assumes a chip on which only compute or only memory traffic takes time, chosen at random, so that both
parts of the bound `seconds` are compared. Prints a line for each violation, then the median and maximum of bound /
figure. The exit code is 1 if there are violations.

FILE (JSON lines) keeps the results, so that the same command continues after an interruption. Compiling a step takes 4
to 30 s of CPU time for cpu-8 and 30 to 200 s for v5e-4; the models in LARGE take minutes.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import random
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# The options of the test suite (tests/compiler.py). They speed up the generation of machine code, and affect no figure.
# JAX's plugin for CUDA aborts at the last one.
os.environ["XLA_FLAGS"] = " ".join(
    (
        *(os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"),
        *("--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"),
        *(
            ["--xla_cpu_use_fusion_emitters=false"]
            if metadata.version("jaxlib").startswith("0.10.") and not importlib.util.find_spec("jax_plugins")
            else []
        ),
    )
)

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.topologies import find_topology
from trainer.runtime.platforms import prepare_to_compile

SIZES = {
    **{"base_emb_dim": 128, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 32, "base_mlp_dim": 256},
    **{"vocab_size": 512, "max_target_length": 128, "base_num_decoder_layers": 4},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 64}
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
RECURRENT = {"gdn_num_key_heads": 4, "gdn_num_value_heads": 4, "gdn_key_head_dim": 32, "gdn_value_head_dim": 32}
# Maps each preset to sizes that are added to SIZES or override them.
MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "llama2-7b": {},
    "llama3.1-8b": {"base_num_kv_heads": 2},
    "gemma-2b": {},
    "gemma2-2b": {"sliding_window_size": 64},
    "gemma3-1b": {"sliding_window_size": 64, "base_num_decoder_layers": 12},
    "qwen2-0.5b": {"base_num_kv_heads": 2},
    "qwen3-0.6b": {},
    "olmo2-1b": {},
    "phi3-mini-4k": {},
    "gpt3-52k": {},
    "granite3-2b": {},
    "mixtral-8x7b": EXPERTS,
    "qwen3-30b-a3b": EXPERTS,
    "gpt-oss-20b": EXPERTS | {"sliding_window_size": 64},
    "deepseek3-tiny": EXPERTS | LATENT | {"base_num_decoder_layers": 5, "first_num_dense_layers": 1},
    "deepseek2-16b": EXPERTS | LATENT | {"base_num_decoder_layers": 5, "first_num_dense_layers": 1},
    "llama4-17b-16e": EXPERTS | {"num_experts_per_tok": 1, "chunk_attn_window_size": 64},
    "qwen3-next-80b-a3b": EXPERTS | RECURRENT,
    "qwen3.5-2b": RECURRENT,
}
# Presets whose blocks differ by layer. One iteration of their loop over layers has 4 to 6 blocks, so compilation takes
# minutes.
LARGE = ("gemma3-1b", "llama4-17b-16e", "qwen3-next-80b-a3b", "qwen3.5-2b")
AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline", "fsdp_transpose", "tensor_sequence")
POLICIES = (
    *("none", "full", "full", "minimal", "minimal_with_context", "save_dot_except_mlp", "save_qkv_proj"),
    *("save_out_proj", "qkv_proj_offloaded", "minimal_offloaded", "save_dot_with_context_except_mlp"),
)
COMBINATIONS = ((True, True, True), (True, False, True), (True, True, False), (True, False, False), (False,) * 3)


def point(rng: random.Random, topologies: list[str]) -> list[str]:
    """Returns the command line of a random point."""
    topology = rng.choice(topologies)
    model = rng.choices(list(MODELS), [1 if name in LARGE else 10 for name in MODELS])[0]
    slices = rng.choice((1, 1, 2)) if not topology.startswith("cpu") else 1
    found = find_topology(topology)
    assert not isinstance(found, str), found
    values = {
        **{"model_name": model, "override_model_config": True, "dataset_type": "synthetic"},
        **{"enable_checkpointing": False, "eval_interval": -1, "compile_topology": topology},
        **{"compile_topology_num_slices": slices, "remat_policy": rng.choice(POLICIES)},
        **SIZES,
        **MODELS[model],
        **_mesh(rng, found.devices, slices),
    }
    values["init_weights_seed"] = rng.randrange(1000)
    values["per_device_batch_size"] = rng.choice((1, 2, 4, 8)) * (64 if not topology.startswith("cpu") else 1)
    enable_nnx, decoder, pure = rng.choice(COMBINATIONS)
    sometimes: list[tuple[float, dict[str, Any]]] = [
        (0.3, {"gradient_accumulation_steps": rng.choice((2, 3))}),
        (0.3, {"num_vocab_tiling": rng.choice((2, 4))}),
        (0.3, {"shard_optimizer_over_data": True}),
        (0.2, {"optimizer_memory_host_offload": True}),
        (0.1, {"parameter_memory_host_offload": True}),
        (0.3, {"enable_nnx": enable_nnx, "pure_nnx_decoder": decoder, "pure_nnx": pure}),
        (0.15, {"quantization": rng.choice(("int8", "fp8"))}),
        (0.15, {"enable_lora": True, "lora_rank": 8, "lora_alpha": 16}),
        (0.1, {"trainable_parameters_mask": "[embedding,norm]"}),
        (0.15, {"opt_type": rng.choice(("sgd", "lion", "adafactor", "muon", "adam_pax"))}),
        (0.3, {"weight_dtype": "bfloat16"}),
        (0.15, {"grad_dtype": "bfloat16"}),
        (0.3, {"dtype": "bfloat16"}),
        (0.1, {"scan_layers": False}),
        (0.1, {"attention": "dot_product"}),
        (0.3, {"sparse_matmul": False, "capacity_factor": rng.choice((-1, 0.5, 1.25))}),
        (0.1, {"mtp_num_layers": 1}),
        (0.1, {"use_dpo": True, "train_data_columns": "[chosen,rejected]"}),
    ]
    for share, more in sometimes:
        if rng.random() < share:
            values |= more
    if "sparse_matmul" in values and "num_experts" not in values:
        del values["sparse_matmul"], values["capacity_factor"]
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def _mesh(rng: random.Random, devices: int, slices: int) -> dict[str, int]:
    """Returns parallelism keys that distribute the devices over random axes, in powers of two."""
    weights = (3, 6, 3, 2, 2, 1, 1, 1)
    keys: dict[str, int] = {f"ici_{axis}_parallelism": 1 for axis in AXES}
    for _ in range(int(math.log2(devices))):
        keys[f"ici_{rng.choices(AXES, weights)[0]}_parallelism"] *= 2
    keys[f"dcn_{rng.choice(('data', 'data', 'fsdp'))}_parallelism"] = slices
    return keys


class Checker:
    """Compares points. Reuses the `Bounds` of each topology, so that their caches are checked, too."""

    def __init__(self) -> None:
        self.bounds: dict[Any, Any] = {}

    def compare(self, words: list[str]) -> dict[str, Any]:
        """Returns a record of the point: its bounds and figures, or why it was refused."""
        try:
            config = load(["base.yml", *words]).config
        except UserError as error:
            return {"refused": str(error)}
        found: dict[str, Any] = {}
        bound = self._try(found, "bound_refused", lambda: self._of(config))
        compiled = self._try(found, "refused", lambda: self._compiled(config))
        if bound is None or compiled is None:
            return found
        return {
            "bound": bound._asdict(),
            "compiled": dict(zip(("arguments", "memory", "seconds"), compiled, strict=True)),
        }

    def _try(self, found: dict[str, Any], name: str, fn: Any) -> Any:
        try:
            return fn()
        except UserError as error:
            found[name] = str(error)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:500]
        return None

    def _of(self, config: Any) -> Any:
        from trainer.aot.topologies import devices_of, topology_of
        from trainer.planning.bounds import Bounds

        slices, chip = config.compile_topology_num_slices, _chip_of_cpu(config)
        key = config.compile_topology, slices, chip and chip.name
        if key not in self.bounds:
            self.bounds[key] = Bounds(devices_of(topology_of(config), slices), chip)
        return self.bounds[key].of(config)

    def _compiled(self, config: Any) -> tuple[int, int, float | None]:
        from trainer.aot.roofline import estimate
        from trainer.train_compile import compile_for_topology

        report = compile_for_topology(config, _options(config.compile_topology)).report
        found = report.estimate
        if (chip := _chip_of_cpu(config)) and not report.cost.unknown_loops:
            found = estimate(report.cost, chip, report.devices, report.num_slices)
        return report.memory.arguments, report.memory.peak, found.seconds if found else None


def _chip_of_cpu(config: Any) -> Any:
    """If the topology consists of simulated CPU devices, returns a chip on which only compute or only memory traffic
    takes time; otherwise None."""
    from trainer.aot.chips import CHIPS

    if not config.compile_topology.startswith("cpu"):
        return None
    free: dict[str, Any] = {"ici_bandwidth": math.inf, "dcn_bandwidth": math.inf}
    if config.init_weights_seed % 2:
        return dataclasses.replace(CHIPS["v5e"], name="memory", peak={"bf16": math.inf}, **free)
    return dataclasses.replace(CHIPS["v5e"], name="compute", hbm_bandwidth=math.inf, **free)


def _options(topology: str) -> dict[str, Any] | None:
    quick = metadata.version("jaxlib").startswith("0.10.") and topology.startswith("v")
    return {"exec_time_optimization_effort": -1.0} if quick else None


def violations(record: dict[str, Any]) -> list[str]:
    """Returns the violations in the record of a point."""
    if "error" in record:
        return [record["error"]]
    if "bound" not in record:
        return (
            ["refused by the bounds, but it compiles"] if "bound_refused" in record and "refused" not in record else []
        )
    return [
        f"{name}: bound {bound:.6g} > {record['compiled'][name]:.6g}"
        for name, bound in record["bound"].items()
        if record["compiled"][name] is not None and bound > record["compiled"][name]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", action="append")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    topologies = args.topology or ["cpu-8"]
    prepare_to_compile(next((name for name in topologies if not name.startswith("cpu")), topologies[0]))
    lines = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    known = {record["words"]: record for record in map(json.loads, lines)}
    rng, checker, records = random.Random(args.seed), Checker(), []
    while sum("bound" in record for record in records) < args.points:
        words = point(rng, topologies)
        record = known.get(" ".join(words))
        if record is None:
            began = time.perf_counter()
            record = {"words": " ".join(words), **checker.compare(words)}
            record["took"] = round(time.perf_counter() - began, 1)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        records.append(record)
        for line in violations(record):
            print(f"VIOLATION {line}\n  {record['words']}", flush=True)
    _summary(records)
    sys.exit(any(map(violations, records)))


def _summary(records: list[dict[str, Any]]) -> None:
    both = [record for record in records if "bound" in record]
    print(f"{len(both)} points compared, {len(records) - len(both)} refused or failed, ", end="")
    print(f"{sum(map(bool, map(violations, records)))} with violations")
    for name in ("arguments", "memory", "seconds"):
        shares = [it["bound"][name] / it["compiled"][name] for it in both if it["compiled"][name]]
        if shares:
            print(f"{name}: bound / figure: median {statistics.median(shares):.3f}, largest {max(shares):.3f}")


if __name__ == "__main__":
    main()
