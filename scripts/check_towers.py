"""Compares `trainer.export ... format=hf like=FOLDER` with Hugging Face's transformers, on tiny models with images.

    pip install -e ".[goldens]" && python scripts/check_towers.py [case ...]

The models are Gemma 3, Mistral 3 (also with a Ministral 3 text model), Llama 4, and Qwen 3.5 (dense and with experts).
Tensors have the names that published folders use, or the names of the modules of transformers 5. transformers saves a
random model, which is exported once without training, and once after three training steps. The checks, in float32 on
the CPU:

- In both exports, the tensors of the vision towers are bit-identical to the original.
- Without training, all tensors are bit-identical to the original, and so are the logits of a row with an image.
- The logits of a text agree with ours within TOLERANCE, both without and after training.
"""

import contextlib
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
from safetensors.numpy import load_file, save_file

from trainer import export, train
from trainer.backends.registry import make_model
from trainer.leaves.source import nested, parted
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source, weight_shapes

TOLERANCE = 1e-5
LENGTH, VOCABULARY = 20, 67
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 7}
TEXT |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 14, "max_position_embeddings": 333}
VISION = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4, "num_channels": 3}
GROWN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 6}
GROWN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
NAMES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}


def gemma3() -> tuple[Any, dict[str, Any]]:
    """Returns a model, and a row in which an image replaces the four tokens 61."""
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=5, query_pre_attn_scalar=9)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
        mm_tokens_per_image=4,
        image_token_index=61,
        boi_token_index=62,
        eoi_token_index=63,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    tokens = torch.tensor([[5, 7, 62, 61, 61, 61, 61, 63, *range(12)]])
    return model, {"input_ids": tokens, "token_type_ids": (tokens == 61).long(), "pixel_values": pixels()}


def mistral3(text: Any = None, tied: bool = False) -> tuple[Any, dict[str, Any]]:
    """Returns a model, and a row with an image of 4 x 4 patches; every 2 x 2 patches become one token. `text`: the
    configuration of the text model; None: that of Mistral."""
    text = text or transformers.MistralConfig(**TEXT, sliding_window=None)
    config = transformers.Mistral3Config(
        text_config=text.to_dict(),
        vision_config={"model_type": "pixtral", "head_dim": 4, **VISION},
        image_token_index=10,
        tie_word_embeddings=tied,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    tokens = torch.tensor([[5, 7, 10, 10, 10, 10, *range(11, 25)]])
    return model, {"input_ids": tokens, "image_sizes": torch.tensor([[16, 16]]), "pixel_values": pixels()}


def ministral3() -> tuple[Any, dict[str, Any]]:
    """Returns the same as `mistral3`, with the text model Ministral 3, whose queries are scaled up from token 6 on."""
    return mistral3(transformers.Ministral3Config(**TEXT, sliding_window=None, rope_parameters=GROWN))


def llama4() -> tuple[Any, dict[str, Any]]:
    """Returns a model, and a row with an image of 4 x 4 patches; every 2 x 2 patches become one token. The chunks of
    chunked attention are shorter than the row."""
    text = transformers.Llama4TextConfig(**TEXT, intermediate_size_mlp=25, num_local_experts=3, attention_chunk_size=5)
    text.interleave_moe_layer_step, text.moe_layers = 1, list(range(TEXT["num_hidden_layers"]))
    size = {"vision_output_dim": 12, "projector_input_dim": 12, "projector_output_dim": 12, "pixel_shuffle_ratio": 0.5}
    size |= {"image_size": 16, "patch_size": 4, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.Llama4Config(
        text_config=text.to_dict(),
        vision_config={**size, "num_attention_heads": 2},
        image_token_index=10,
        boi_token_index=61,
        eoi_token_index=62,
    )
    # transformers 5.24 reads this field of the text model's output, which does not have it.
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    model = transformers.Llama4ForConditionalGeneration(config)
    tokens = torch.tensor([[5, 61, 10, 10, 10, 10, 62, *range(11, 24)]])
    return model, {"input_ids": tokens, "pixel_values": pixels()}


def qwen3_5(kind: str = "", **text: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a model, and a row with an image of 4 x 4 patches; every 2 x 2 patches become one token. `kind`: "Moe"
    for the classes with experts. `text`: further fields of the text model's configuration."""
    size = {**TEXT, "hidden_size": 32, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2}
    size |= {"linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
    size |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]}}
    size["rope_parameters"] |= {"partial_rotary_factor": 0.5, "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "patch_size": 4}
    vision |= {"temporal_patch_size": 1, "out_hidden_size": 32, "num_position_embeddings": 16}
    ends = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 61, "vision_end_token_id": 62}
    config = getattr(transformers, f"Qwen3_5{kind}Config")(text_config={**size, **text}, vision_config=vision, **ends)
    model = getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration")(config)
    tokens = torch.tensor([[5, 61, 10, 10, 10, 10, 62, *range(12, 25)]])
    patches = torch.randn(16, 3 * 16, generator=torch.Generator().manual_seed(1))
    kinds = (tokens == 10).int()
    return model, {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])} | {
        "mm_token_type_ids": kinds
    }


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
EXPERTS |= {"shared_expert_intermediate_size": 12, "num_key_value_heads": 2}
CASES = {"gemma3": gemma3, "mistral3": mistral3, "llama4": llama4, "mistral3 tied": lambda: mistral3(tied=True)}
CASES |= {"ministral3": ministral3, "qwen3.5": qwen3_5, "qwen3.5 moe": lambda: qwen3_5("Moe", **EXPERTS)}


def pixels() -> torch.Tensor:
    """Returns an image."""
    return torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def saved(model: Any, folder: Path, as_modules: bool) -> None:
    """Gives the model random weights and saves it. If `as_modules`, tensors have the names of the model's modules,
    otherwise the names under which transformers saves them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.save_pretrained(folder)
    if as_modules:
        tensors = load_file(folder / "model.safetensors")
        renamed = {}
        for name, value in tensors.items():
            prefix = next((prefix for prefix in NAMES if name.startswith(prefix)), "")
            renamed[NAMES.get(prefix, "model.") + name.removeprefix(prefix)] = value
        (folder / "model.safetensors").unlink()
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def theirs(model: Any, folder: Path, row: dict[str, Any]) -> np.ndarray:
    """Returns the logits that transformers computes for `row` with the weights in `folder`."""
    found, report = type(model).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    if any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise ValueError(f"missing, unexpected or mismatched tensors: {report}")
    with torch.no_grad():
        return found.eval()(**row).logits.numpy()


def ours(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Returns our logits for the text model in `folder`."""
    source = open_source(str(folder))
    config = model_config(source.keys, ["dtype=float32"], str(folder))
    model = make_model(config)
    leaves = source.leaves(config, weight_shapes(config))
    weights = {name: leaf.read(np.dtype(np.float32), lambda count: None) for name, leaf in leaves.items()}
    params, rest = parted(nested(weights), model.abstract[1])
    position, ones = np.arange(tokens.size, dtype=np.int32)[None], np.ones_like(tokens)
    hidden, _, _ = model.apply(params, rest, tokens, position, ones, np.zeros(1, np.int32))
    return np.asarray(model.apply(params, rest, hidden, method="head")[0])


def check(make: Any, folder: Path, as_modules: bool) -> list[float]:
    """Checks one case. Returns two numbers: the largest difference between our logits of a text and those of
    transformers, without and after training, relative to the largest logit.

    Raises:
      ValueError: tensors or logits that must be equal are not.
    """
    model, row = make()
    first, back, run, trained = (folder / name for name in ("first", "back", "run", "trained"))
    saved(model, first, as_modules)
    steps = [f"base_output_directory={folder}", "run_name=run", "steps=3", "dataset_type=synthetic", "dtype=float32"]
    small = ["per_device_batch_size=1", "max_target_length=32", "learning_rate=0.03", "warmup_steps_fraction=0"]
    with contextlib.redirect_stdout(io.StringIO()):
        export.main([str(first), str(back), "format=hf", f"like={first}"])
        train.main(["base.yml", f"load_parameters_path={first}", *steps, *small, "enable_checkpointing=true"])
        export.main([str(run), str(trained), "format=hf", f"like={first}"])
    before, after, final = (load_file(it / "model.safetensors") for it in (first, back, trained))
    if not before.keys() == after.keys() == final.keys():
        raise ValueError("an export has other tensor names than the original")
    if [name for name in before if before[name].tobytes() != after[name].tobytes()]:
        raise ValueError("an export without training changed tensors")
    changed = {name for name in before if before[name].tobytes() != final[name].tobytes()}
    if changed != {name for name in before if "language_model" in name or name.startswith("lm_head")}:
        raise ValueError("training changed other tensors than those of the text model, or not all of them")
    if not np.array_equal(theirs(model, first, row), theirs(model, back, row)):
        raise ValueError("an export without training changed the logits of the row with an image")
    text = np.arange(20, 20 + LENGTH, dtype=np.int32)[None]
    differences = []
    for each in (back, trained):
        expected = theirs(model, each, {"input_ids": torch.tensor(text, dtype=torch.long)})
        differences.append(float(np.max(np.abs(ours(each, text) - expected)) / np.max(np.abs(expected))))
    return differences


def main() -> int:
    """Checks the cases that the command line names, or every case. Returns the exit code."""
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, jax {jax.__version__}")
    worst = 0.0
    for name, make in CASES.items():
        if name not in (sys.argv[1:] or CASES):
            continue
        # For Llama 4 and Qwen 3.5, the names of the modules are the published names, so one check suffices.
        for as_modules in (False,) if name.startswith(("llama4", "qwen")) else (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found = check(make, Path(folder), as_modules)
            print(f"{name}, {'names of modules' if as_modules else 'names as saved'}: {found[0]:.1e} {found[1]:.1e}")
            worst = max(worst, *found)
    return worst > TOLERANCE


if __name__ == "__main__":
    raise SystemExit(main())
