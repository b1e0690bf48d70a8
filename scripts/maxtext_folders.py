"""Writes small checkpoints with MaxText 0.2.5, and compares logits in both directions.

    python scripts/maxtext_folders.py write OUT [NAME ...]    in an environment with MaxText on CPU
    python scripts/maxtext_folders.py check PYTHON [NAME ...]    in this trainer's environment

PYTHON is the interpreter of the environment with MaxText; each NAME is a key of CASES.

`write` trains each model of CASES for two steps with MaxText's training program, which also saves the model.
OUT/NAME.zip has the run's folder, the model's keys (keys.json), and tokens with MaxText's float32 logits
(expected.npz). The files in tests/maxtext-0.2.5 were written this way, and the tests load them.

`check` loads each model in tests/maxtext-0.2.5 with this trainer and exports it for MaxText. MaxText loads the export
with the arguments that `trainer.export` prints, once as MaxText's training does and once as its decoding does. `check`
prints the largest differences of the logits after the import and after the export, and exits with 1 if one exceeds its
tolerance. docs/guides/weights.md has a dated result.
"""

import contextlib
import functools
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
FOLDERS = Path(__file__).parents[1] / "tests" / "maxtext-0.2.5"
TOLERANCE = 1e-5  # for float32 logits of up to 5; MaxText and this trainer sum the same products in different orders
# Recurrent layers amplify rounding: logits differed by 4.2e-5 on an Intel Xeon, and by less than 1e-5 on an AMD EPYC.
RECURRENT = dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), 2e-4)
TINY = {
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "base_mlp_dim": 24,
    "base_num_decoder_layers": 2,
    "vocab_size": 64,
    "decoder_block": "llama2",
}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 3, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
# With this model_name, MaxText's deepseek block weights experts by their scores without the routing bias.
AS_V3 = {"model_name": "deepseek3-671b", "override_model_config": True}
DEEPSEEK = AS_V3 | {
    "normalization_layer_epsilon": 1e-6,
    "rope_type": "yarn",
    "rope_factor": 4,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
    "rope_interleave": True,
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "base_num_kv_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_experts": 1,
    "base_moe_mlp_dim": 16,
    "first_num_dense_layers": 1,
    "base_num_decoder_layers": 3,
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
QWEN3 = {
    "decoder_block": "qwen3",
    "use_qk_norm": True,
    "logits_via_embedding": True,
    "normalize_embedding_logits": False,
}
POST_NORMS = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
GEMMA = {
    "decoder_block": "gemma",
    "mlp_activations": "[gelu,linear]",
    "normalization_layer_epsilon": 1e-6,
    "logits_via_embedding": True,
}
GEMMA2 = GEMMA | POST_NORMS
GEMMA2 |= {
    "decoder_block": "gemma2",
    "sliding_window_size": 3,
    "attn_logits_soft_cap": 4.0,
    "final_logits_soft_cap": 8.0,
}
# This model_name determines MaxText's scale of attention scores. Seven layers are one period of six and one layer more.
GEMMA3 = GEMMA | POST_NORMS | {"model_name": "gemma3-27b", "override_model_config": True, "rope_max_timescale": 1000}
GEMMA3 |= {"decoder_block": "gemma3", "sliding_window_size": 3, "local_rope_max_timescale": 100}
GEMMA3 |= {"rope_linear_scaling_factor": 8.0, "base_num_decoder_layers": 7}
QWEN2 = {"decoder_block": "qwen2", "attention_bias": True}
# With this model_name, MaxText normalizes queries and keys over all heads together.
OLMO3 = {"model_name": "olmo3-7b", "override_model_config": True, "inhomogeneous_layer_cycle_interval": 4}
OLMO3 |= {"decoder_block": "olmo3", "sliding_window_size": 3, "base_num_decoder_layers": 4, "base_num_kv_heads": 2}
OLMO3 |= {"use_qk_norm": True, "rope_type": "default", "rope_max_timescale": 1000, "normalization_layer_epsilon": 1e-6}
OF_YARN = {"rope_type": "yarn", "rope_factor": 4, "original_max_position_embeddings": 16, "max_position_embeddings": 64}
# YaRN, as in MaxText's presets of this family. MaxText applies it to all layers.
OLMO3_LONG = OLMO3 | OF_YARN | {"rope_interleave": False, "rope_attention_scaling": True}
# Some layers have RoPE and chunked attention, the others have neither. Some have an MLP, the others have experts.
LLAMA4 = {"decoder_block": "llama4", "use_qk_norm": True, "nope_layer_interval": 4, "interleave_moe_layer_step": 2}
LLAMA4 |= {"inhomogeneous_layer_cycle_interval": 4, "base_num_decoder_layers": 4, "chunk_attn_window_size": 3}
LLAMA4 |= {"temperature_tuning": True, "num_experts": 4, "num_experts_per_tok": 1, "shared_experts": 1}
LLAMA4 |= {"base_moe_mlp_dim": 12, "rope_type": "llama3.1", "rope_max_timescale": 1000}
GPT_OSS = {"decoder_block": "gpt_oss", "num_experts": 4, "num_experts_per_tok": 3, "base_moe_mlp_dim": 24}
GPT_OSS |= OF_YARN | {"rope_interleave": False, "rope_attention_scaling": True, "rope_truncate": False}
GPT_OSS |= {"base_num_decoder_layers": 4, "sliding_window_size": 3, "attention_bias": True}
GPT_OSS |= {"mlp_activations": "[sigmoid,linear]", "mlp_activations_limit": 0.5}
GPT_OSS |= {"inhomogeneous_layer_cycle_interval": 2}
# Six layers: two recurrent ones and one with attention, twice. In recurrent layers, two value heads share a key head.
QWEN3_NEXT = {"decoder_block": "qwen3_next", "base_num_decoder_layers": 6, "inhomogeneous_layer_cycle_interval": 3}
QWEN3_NEXT |= {"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 8, "gdn_value_head_dim": 12}
QWEN3_NEXT |= {"gdn_chunk_size": 4, "partial_rotary_factor": 0.5, "normalization_layer_epsilon": 1e-6}
QWEN3_NEXT |= {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 12, "base_mlp_dim": 12}
QWEN3_NEXT |= {"shared_experts": 1, "norm_topk_prob": True}
# Eight layers: two recurrent ones follow the two complete periods of three.
QWEN3_NEXT_REST = QWEN3_NEXT | {"base_num_decoder_layers": 8}
# mRoPE, as in MaxText's presets of this family. For text alone, its positions equal ordinary positions.
QWEN3_5 = QWEN3_NEXT | {"decoder_block": "qwen3_5", "use_mrope": True, "mrope_section": [2, 1, 1]}
# MaxText's keys for features that this trainer's blocks always have.
GPT_OSS_ALWAYS = {"attention_sink": True, "routed_bias": True, "mlp_bias": True}
# Keys whose values differ in this trainer.
OURS = {
    "gemma2": {"base_num_decoder_layers": 4},  # each of MaxText's layers is a pair of this trainer's
    "gemma3": {"query_pre_attn_scalar": 8},  # as in MaxText: base_emb_dim // base_num_query_heads
    "qwen3_5": {"decoder_block": "qwen3_5_moe"},
}
ALWAYS = {"gpt_oss": GPT_OSS_ALWAYS}
NOT_OURS = (*AS_V3, "scan_layers", "use_mrope", "mrope_section", "gdn_chunk_size")
SCANNED, UNSCANNED = {"scan_layers": True}, {"scan_layers": False}
# The keys of each model, and whether MaxText scans its layers.
CASES = {
    "dense": TINY | SCANNED,
    "dense_unscanned": TINY | UNSCANNED,
    "dense_tied": TINY | QWEN3 | SCANNED,
    "experts": TINY | EXPERTS | SCANNED,
    "experts_unscanned": TINY | EXPERTS | UNSCANNED,
    "deepseek": TINY | DEEPSEEK | SCANNED,
    "deepseek_unscanned": TINY | DEEPSEEK | UNSCANNED,
    "gemma": TINY | GEMMA | SCANNED,
    "gemma2": TINY | GEMMA2 | SCANNED,
    "gemma2_unscanned": TINY | GEMMA2 | UNSCANNED,
    "gemma3": TINY | GEMMA3 | SCANNED,
    "gemma3_unscanned": TINY | GEMMA3 | UNSCANNED,
    "qwen2": TINY | QWEN2 | SCANNED,
    "olmo3": TINY | OLMO3 | SCANNED,
    "olmo3_unscanned": TINY | OLMO3_LONG | UNSCANNED,
    "llama4": TINY | LLAMA4 | SCANNED,
    "llama4_unscanned": TINY | LLAMA4 | UNSCANNED,
    "gpt_oss": TINY | GPT_OSS | GPT_OSS_ALWAYS | SCANNED,
    "gpt_oss_unscanned": TINY | GPT_OSS | GPT_OSS_ALWAYS | UNSCANNED,
    "qwen3_next": TINY | QWEN3_NEXT_REST | SCANNED,
    "qwen3_next_unscanned": TINY | QWEN3_NEXT | {"base_num_decoder_layers": 4} | UNSCANNED,
    "qwen3_5": TINY | QWEN3_5 | SCANNED,
    "qwen3_5_unscanned": TINY | QWEN3_5 | {"base_num_decoder_layers": 3} | UNSCANNED,
    "params": TINY | SCANNED,
    "params_unscanned": TINY | UNSCANNED,
}
PARAMS_ONLY = ("params", "params_unscanned")  # written by MaxText's parameter-only tool, in bfloat16
LOADS = ("load_parameters_path", "from_pretrained")  # the ways in which MaxText loads exported parameters
# Logits are computed in full float32 precision, and experts drop no tokens.
COMPUTED = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "megablox": False,
    "sparse_matmul": False,
    "capacity_factor": -1.0,
    "enable_dropout": False,
    "max_target_length": 8,
    "per_device_batch_size": 2,
    "dataset_type": "synthetic",
    "skip_jax_distributed_system": True,
    "run_name": "run",
}
RUN = {
    "learning_rate": 0.05,
    "steps": 2,
    "checkpoint_period": 1,
    "max_num_checkpoints_to_keep": 1,
    "async_checkpointing": False,
    "enable_tensorboard": False,
}


# ---- In the environment with MaxText


def arguments(keys: dict[str, Any]) -> list[str]:
    """Returns the arguments of a MaxText program: its base.yml, COMPUTED and `keys`."""
    from maxtext.configs import pyconfig

    base = Path(pyconfig.__file__).parent / "base.yml"
    return ["maxtext", str(base), *(f"{name}={value}" for name, value in (COMPUTED | keys).items())]


def train(out: Path, keys: dict[str, Any]) -> Path:
    """Trains a model with MaxText, and returns the folder of its newest checkpoint."""
    from maxtext.trainers.pre_train import train as maxtext_train

    # Adam's moments would be two thirds of the file, so only one stored case has them.
    optimizer = {"opt_type": "adamw" if out.name in ("dense", *PARAMS_ONLY) else "sgd"}
    rate = {"routed_bias_update_rate": 0.1 if keys["decoder_block"] == "deepseek" else 0.0}
    maxtext_train.main(arguments(keys | RUN | rate | optimizer | {"base_output_directory": out}))
    return newest(out / "run")


def params_only(folder: Path, out: Path, keys: dict[str, Any]) -> Path:
    """Writes a checkpoint's parameters with MaxText's parameter-only tool, and returns the new folder."""
    from maxtext.utils import generate_param_only_checkpoint

    # The tool builds the run's optimizer, so it needs opt_type. With force_unroll it unstacks scanned layers.
    said = {"opt_type": "adamw", "load_full_state_path": folder / "items", "base_output_directory": out}
    generate_param_only_checkpoint.main(arguments(keys | {"force_unroll": not keys["scan_layers"]} | SCANNED | said))
    return newest(out / "run")


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))


def logits(folder: Path, keys: dict[str, Any], how: str) -> dict[str, Any]:
    """Returns random tokens, and the logits that MaxText's model computes for them with the parameters in `folder`.

    `how` is the way in which MaxText loads the parameters: "load_full_state_path" or "load_parameters_path", as in
    MaxText's training, or "from_pretrained", as in MaxText's decoding and post-training.
    """
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.utils import generate_param_only_checkpoint, maxtext_utils, model_creation_utils

    key = "load_parameters_path" if how == "from_pretrained" else how
    optimizer = {"opt_type": "sgd"} if not (folder / "items" / "_METADATA").read_text().count("'mu'") else {}
    config = pyconfig.initialize(arguments(keys | optimizer | {key: folder / "items"}))
    mesh = maxtext_utils.get_mesh_from_config(config)
    if how == "from_pretrained":
        model = model_creation_utils.from_pretrained(config, mesh=mesh)
    else:
        # _read_train_checkpoint first builds a model eagerly, which takes minutes. Only Muon needs this model, so it is
        # not built.
        build = model_creation_utils.from_config
        made = iter([lambda *args, **kwargs: None])
        with mock.patch.object(model_creation_utils, "from_config", lambda *a, **k: next(made, build)(*a, **k)):
            state, _ = generate_param_only_checkpoint._read_train_checkpoint(config, None, mesh)
        model = nnx.merge(nnx.graphdef(model_creation_utils.create_nnx_abstract_model(config, mesh)[1]), state.model)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, config.max_target_length), np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    names = ("decoder_input_tokens", "decoder_positions", "decoder_segment_ids")
    with mesh:
        forward = nnx.jit(lambda model, *given: model(**dict(zip(names, given, strict=True)), enable_dropout=False))
        found = forward(model, tokens, positions, jnp.ones_like(tokens))
    return {"tokens": tokens, "logits": np.asarray(found, np.float32)}


def write(out: Path, names: list[str]) -> None:
    """Writes the cases in `names`, or all cases if `names` is empty."""
    for name, keys in CASES.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary) / name
            trained = train(work, keys | (SCANNED if name in PARAMS_ONLY else {}))
            folder = params_only(trained, Path(temporary) / "alone", keys) if name in PARAMS_ONLY else trained
            # MaxText's training cannot load the output of MaxText's parameter-only tool.
            how = "from_pretrained" if name in PARAMS_ONLY else "load_full_state_path"
            np.savez(work / "expected.npz", **logits(folder, keys, how))
            (work / "keys.json").write_text(json.dumps(keys))
            with zipfile.ZipFile(out / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as file:
                file.write(work / "expected.npz", "expected.npz")
                file.write(work / "keys.json", "keys.json")
                for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                    file.write(path, Path("run", "checkpoints", folder.name, path.relative_to(folder)))
        print(f"{name}: {(out / f'{name}.zip').stat().st_size} bytes", flush=True)


# ---- In this trainer's environment


def configured(keys: dict[str, Any], **more: Any) -> Any:
    """Returns the resolved float32 configuration for MaxText's keys `keys` and this trainer's keys `more`."""
    from trainer.config.flags import flags_of
    from trainer.config.load import load
    from trainer.config.resolve import resolve

    keys = keys | OURS.get(keys["decoder_block"], {}) | more
    words = [f"{name}={value}" for name, value in keys.items() if is_ours(name, keys)]
    words += ["dataset_type=synthetic", "dtype=float32", "weight_dtype=float32", "max_target_length=8"]
    words += [f"{name}={value}" for name, value in flags_of("nnx").items()]
    return resolve(load(["maxtext.yml", *words]).config, device_count=1, platform="cpu")


@functools.cache
def our_model(config: Any) -> tuple[Any, Any]:
    """Returns this trainer's model, and a compiled function (params, rest, table, tokens) -> logits.

    `rest` is the state other than parameters. A tied head uses `table` in place of the embedding in `params`.
    """
    import jax

    from trainer.backends.registry import make_model

    model = make_model(config)

    def logits(params: Any, rest: Any, table: Any, tokens: Any) -> Any:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        rows = np.arange(len(tokens), dtype=np.int32)
        hidden, _, _ = model.apply(params, rest, tokens, positions, np.ones_like(positions), rows)
        if config.logits_via_embedding:
            params = params | {"token_embedder": {"embedding": table}}
        return model.apply(params, rest, hidden, method="head")[0]

    return model, jax.jit(logits)


def our_logits(folder: Path, keys: dict[str, Any], tokens: np.ndarray, **more: Any) -> list[np.ndarray]:
    """Returns the logits of this trainer's model with the parameters in `folder`.

    If the head is not tied, the list has one entry. If it is tied, the list has two: the first is computed with the
    head's table rounded to bfloat16, as MaxText rounds it even in float32 runs, and the second with the exact table.
    """
    from trainer.leaves.source import nested, parted
    from trainer.weights.open import open_source, weights_of

    config = configured(keys, **more)
    model, program = our_model(config)
    leaves = open_source(str(folder)).leaves(config, weights_of(model)[0])
    weights = {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}
    params, rest = parted(nested(weights), model.abstract[1])
    table = np.asarray(params["token_embedder"]["embedding"])
    tables = [table.astype("bfloat16").astype(table.dtype), table] if config.logits_via_embedding else [table]
    return [np.asarray(program(params, rest, it, tokens), np.float32) for it in tables]


def is_ours(name: str, keys: dict[str, Any]) -> bool:
    """Returns whether this trainer accepts the key `name` of a case."""
    return name not in NOT_OURS and name not in ALWAYS.get(keys["decoder_block"], {})


def exported(folder: Path, out: Path, keys: dict[str, Any]) -> list[str]:
    """Exports the checkpoint for MaxText, and returns the arguments (key=value) with which MaxText loads it."""
    from trainer import export
    from trainer.config.dump import to_flow
    from trainer.config.effects import no_effect_of

    config = configured(keys)
    scan = f"scan_layers={str(keys['scan_layers']).lower()}"
    said = io.StringIO()
    given = [name for name in keys | OURS.get(keys["decoder_block"], {}) if name in config and is_ours(name, keys)]
    given = [name for name in given if no_effect_of(config, name) is None]
    model = [f"{name}={to_flow(config[name])}" for name in given]
    with contextlib.redirect_stdout(said):
        export.main([str(folder), str(out), "format=maxtext", scan, *model])
    return [word for word in shlex.split(said.getvalue().splitlines()[-1]) if "=" in word]


def check(python: str, names: list[str]) -> int:
    """Compares logits in both directions, for the cases in `names`, or for all cases if `names` is empty. Returns the
    exit code."""
    wrong = 0
    for path in sorted(path for path in FOLDERS.glob("*.zip") if not names or path.stem in names):
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary)
            zipfile.ZipFile(path).extractall(work)
            keys, expected = json.loads((work / "keys.json").read_text()), np.load(work / "expected.npz")
            ours = our_logits(work / "run", keys, expected["tokens"])[0]
            words = exported(work / "run", work / "out", keys)
            command = [python, __file__, "logits", str(work / "out" / "0"), str(work / "theirs.npz"), *words]
            if subprocess.run(command, capture_output=True).returncode:
                raise SystemExit(f"MaxText does not load {path.stem}: {shlex.join(command)}")
            theirs = dict(np.load(work / "theirs.npz"))
        inward = np.abs(ours - expected["logits"]).max()
        outward = max(np.abs(ours - it).max() for it in theirs.values())
        wrong += max(inward, outward) > tolerance(keys)
        print(f"{path.stem:<20} {np.abs(ours).max():.2f}  imported {inward:.1e}  exported {outward:.1e}", flush=True)
    return int(wrong > 0)


def tolerance(keys: dict[str, Any]) -> float:
    """Returns the largest allowed difference of logits."""
    return RECURRENT.get(keys.get("decoder_block", ""), TOLERANCE)


def main(words: list[str]) -> int:
    """Runs `write`, `check`, or `logits`, which `check` runs in MaxText's environment. Returns the exit code."""
    match words:
        case ["write", out, *names]:
            write(Path(out), names)
        case ["check", python, *names]:
            return check(python, names)
        case ["logits", folder, out, *keys]:
            given = dict(word.split("=", 1) for word in keys if not word.startswith("load_parameters_path="))
            np.savez(out, **{how: logits(Path(folder), given, how)["logits"] for how in LOADS})
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
