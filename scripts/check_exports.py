"""Loads exports of `trainer.export format=hf` with Hugging Face's transformers, and compares the logits with ours.

    pip install -e ".[goldens]" && python scripts/check_exports.py [part of a case's name ...]

The cases are every preset whose architecture transformers supports, with unusual small sizes, and further settings of
each architecture. Weights are random. For each case, the script prints the largest difference of the logits, relative
to the largest logit, in float32 on the CPU. The exit code is 1 if a difference exceeds TOLERANCE, if transformers
cannot load a file, or if a tensor is missing or unexpected. docs/benchmarks/weights.md has a dated result.
"""

import contextlib
import functools
import io
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["USE_HUB_KERNELS"] = "NO"  # use transformers' own Python code, even if the package `kernels` is installed
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers

from trainer import export
from trainer.backends.base import Model
from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.files import preset_names
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.source import Leaf, joined, names_of, nested, parted
from trainer.models.families import family, hugging_face
from trainer.weights.params.write import write_params

TOLERANCE = 1e-5
ROWS, LENGTH = 2, 20
SIZES = {
    "base_emb_dim": 30,
    "vocab_size": 61,
    "base_mlp_dim": 37,
    "base_num_decoder_layers": 3,
    "max_target_length": 333,
}
OF_HEADS = {"base_num_query_heads": 6, "base_num_kv_heads": 2, "head_dim": 14}
# For DeepSeek-V2, transformers views the rotated part of a vector as complex numbers, so the parts before it must have
# even sizes.
OF_LATENTS = {"base_num_query_heads": 3, "base_num_kv_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 12}
OF_LATENTS |= {"qk_rope_head_dim": 6, "v_head_dim": 9}
OF_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "base_moe_mlp_dim": 13}
PLAIN = {"mlp_activations": "[silu,linear]", "enable_dropout": "false"}
YARN = {"rope_type": "yarn", "rope_factor": 4, "original_max_position_embeddings": 16, "beta_fast": 4}
LLAMA31 = {"rope_type": "llama3.1", "rope_factor": 8, "original_max_position_embeddings": 16}
# The keys of further cases, by name.
FURTHER = {
    "one layer": {"base_num_decoder_layers": 1, "first_num_dense_layers": 0},
    "one kv head": {"base_num_kv_heads": 1},
    "tied": {"logits_via_embedding": True, "normalize_embedding_logits": False},
    "interleaved heads": {"rope_interleave": True},
    "yarn": YARN,
    "yarn without scaling": YARN | {"rope_attention_scaling": False, "rope_truncate": False},
    "llama3.1": LLAMA31,
    "linear": {"rope_linear_scaling_factor": 2},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 5},
    "gelu": {"mlp_activations": "[gelu,linear]"},
}


def cases() -> dict[str, dict[str, object]]:
    """Returns the keys of each case."""
    found: dict[str, dict[str, object]] = {}
    for name in preset_names():
        preset = load(["base.yml", f"model_name={name}", "dataset_type=synthetic"]).config
        block = preset.decoder_block
        if not family(block).hugging_face:
            continue
        latent = preset.attention_type == "mla"
        keys: dict[str, Any] = {"model_name": name, **PLAIN, **SIZES, **(OF_LATENTS if latent else OF_HEADS)}
        if preset.num_experts > 1:
            keys |= OF_EXPERTS
            keys |= {"first_num_dense_layers": 1} if preset.first_num_dense_layers else {}
            keys |= {"n_routing_groups": 3, "topk_routing_group": 2} if preset.n_routing_groups > 1 else {}
        keys |= {"head_dim": 16} if preset.partial_rotary_factor != 1 else {}
        if preset.rope_type == "longrope":
            keys["base_emb_dim"] = 6 * keys["head_dim"]  # transformers checks the factors' number against this ratio
            rotated = int(keys["head_dim"] * preset.partial_rotary_factor)
            keys |= {f"rope_{which}_factor": [1 + i / 4] * (rotated // 2) for i, which in enumerate(("short", "long"))}
        keys |= {"q_lora_rank": 7} if preset.q_lora_rank else {}
        keys |= {"original_max_position_embeddings": 16} if preset.rope_type != "default" else {}
        keys |= {"temperature_tuning_floor_scale": 16} if preset.temperature_tuning else {}
        keys |= {"sliding_window_size": 5} if preset.sliding_window_size else {}
        keys |= {"base_num_decoder_layers": 7} if preset.sliding_window_size else {}
        keys |= {"query_pre_attn_scalar": 9} if preset.query_pre_attn_scalar else {}
        found[name] = keys
        # FURTHER is applied once to each architecture: to the first preset that has it.
        kind = hugging_face(configured(keys)).model_type
        found |= {f"{kind}: {what}": keys | more for what, more in FURTHER.items() if f"{kind}: {what}" not in found}
    return found


def configured(keys: dict[str, object]) -> Any:
    """Returns the resolved configuration of a case."""
    words = [f"{key}={value}" for key, value in keys.items()]
    loaded = load(["base.yml", "dataset_type=synthetic", "dtype=float32", "weight_dtype=float32", *words])
    return resolve(loaded.config, device_count=1, platform="cpu")


def random_weights(model: Model) -> dict[str, np.ndarray]:
    """Returns random weights of a scale at which scores, activations and norms all affect the logits."""
    rng = np.random.default_rng(0)
    return {
        name: rng.uniform(0.25, 1.0, leaf.shape).astype(leaf.dtype)
        if leaf.ndim <= 1 or name.endswith(("scale", "bias"))
        else rng.normal(size=leaf.shape, scale=0.3).astype(leaf.dtype)
        for name, leaf in names_of(joined(*model.abstract)).items()
    }


def difference(keys: dict[str, object], folder: Path) -> float:
    """Exports a random model with the configuration keys `keys` to a folder within `folder`. Returns the largest
    difference between our logits and those of transformers, relative to the largest logit."""
    config = configured(keys)
    model = make_model(config)
    weights = random_weights(model)
    leaves = {name: Leaf(it.shape, it.dtype, [functools.partial(np.asarray, it)]) for name, it in weights.items()}
    (folder / "ours").mkdir()
    write_params(folder / "ours", config, leaves, None)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            export.main([str(folder / "ours"), str(folder / "theirs"), "format=hf", "max_target_length=333"])
        except SystemExit:
            raise UserError(said.getvalue()) from None
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "theirs",
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # torch's grouped products require multiples of 16 bytes
    )
    if any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"missing, unexpected or mismatched tensors: {report}")
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    params, rest = parted(nested(weights), model.abstract[1])
    position = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    hidden, _, _ = model.apply(params, rest, tokens, position, np.ones_like(tokens), np.arange(ROWS, dtype=np.int32))
    ours = np.asarray(model.apply(params, rest, hidden, method="head")[0])
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    return float(np.max(np.abs(ours - expected)) / np.max(np.abs(expected)))


def main() -> int:
    """Checks the cases that the command line names, or every case."""
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, jax {jax.__version__}")
    failed = []
    for name, keys in cases().items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = difference(keys, Path(folder))
                text = f"{found:.1e}"
            except UserError as error:  # for example, the family does not support a window
                found, text = 0.0, f"refused: {' '.join(str(error).split())[:120]}"
            except Exception as error:  # any error of transformers while it loads a file
                found, text = np.inf, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{name:<40} {text}", flush=True)
        if found > TOLERANCE:
            failed.append(name)
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
