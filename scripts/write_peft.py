"""Writes tests/peft: adapters that peft writes for the models of tests/goldens, with their logits.

    pip install -e ".[goldens]" && python scripts/write_peft.py [check FOLDER]

Each case is a folder written by PeftModel.save_pretrained, with an additional file expected.npz: the logits for the
golden's batch "rows". The folder "steps", which `train` writes, has an adapter before and after 20 training steps,
and the losses.

With `check`, peft loads the adapters FOLDER/CASE, which trainer.weights.peft.write has written, onto each case's base
model, and the script prints how much the logits differ from the expected ones.
"""

import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ["USE_HUB_KERNELS"] = "NO"

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).parent.parent / "tests" / "goldens"
FOLDER = Path(__file__).parent.parent / "tests" / "peft"
STEPS, BATCHES, ROWS, LENGTH = 20, 4, 2, 16


class Case(NamedTuple):
    """The name of the base model in tests/goldens, arguments of LoraConfig, and the dtype of the adapter's file."""

    base: str
    lora: dict[str, Any]
    dtype: torch.dtype = torch.float32


_HEAD = ["lm_head", "embed_tokens", "model.norm"]
_LAST = {"layers_to_transform": [1], "use_rslora": True}
_STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
CASES = {
    "llama": Case("llama", {"target_modules": "all-linear", "r": 4}),
    "llama-saved": Case("llama", {"target_modules": ["q_proj", "v_proj"], "modules_to_save": _HEAD, **_LAST}),
    "llama-head": Case("llama", {"target_modules": ["k_proj", "lm_head"]}),
    "llama-tied": Case(
        "llama-tied",
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "qwen2-biases": Case("qwen2", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "qwen3": Case("qwen3", {"target_modules": r".*\.(q_proj|k_proj|up_proj)"}, torch.bfloat16),
    "gemma2": Case("gemma2", {"target_modules": ["q_proj", "gate_proj"], "lora_dropout": 0.1}, torch.float16),
    "gemma3": Case("gemma3", {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "r": 1}),
    "mixtral": Case("mixtral", {"target_modules": ["q_proj"], "target_parameters": _STACKED}),
    "mixtral-down": Case("mixtral", {"target_modules": [], "target_parameters": _STACKED[1:2]}),
    "mixtral-named": Case("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "deepseek-v3": Case("deepseek-v3", {"target_modules": "all-linear"}),
    "phi3": Case("phi3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}),
}
# The base model of the case in which tensors have transformers 4's names. In transformers 4, each matrix of each expert
# is a module.
OF_4 = "qwen3-moe"


def main() -> None:
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["check"]:
        check(Path(sys.argv[2]))
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    for seed, (name, case) in enumerate(CASES.items()):
        model = adapted(case, seed)
        folder = FOLDER / name
        model.save_pretrained(folder)
        file = folder / "adapter_model.safetensors"
        save_file({key: it.to(case.dtype) for key, it in load_file(file).items()}, file, {"format": "pt"})
        write_expected(folder, PeftModel.from_pretrained(base(case.base), folder), case.base)
    write_of_4(FOLDER / OF_4)
    train(FOLDER / "steps")
    for folder in FOLDER.iterdir():
        (folder / "README.md").unlink(missing_ok=True)
    (FOLDER / "README.md").write_text(
        "Written by `scripts/write_peft.py`, which says what is in it; do not edit. "
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, "
        f"peft {version()}.\n"
    )


def version() -> str:
    from peft import __version__

    return __version__


def base(name: str) -> Any:
    """Returns the model tests/goldens/NAME. Its path is relative, because peft writes it into an adapter's files."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / name, **options).eval()
    model.config._name_or_path = model.name_or_path = f"tests/goldens/{name}"
    return model


def adapted(case: Case, seed: int) -> Any:
    """Returns a base model with adapters whose lora_A and lora_B are both far from zero."""
    torch.manual_seed(seed)
    model = get_peft_model(base(case.base), LoraConfig(task_type="CAUSAL_LM", **{"r": 2} | case.lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.5 * parameter.shape[-1] ** -0.5 if "lora_A" in name else 0.5)
            elif parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def write_of_4(folder: Path) -> None:
    """Writes a random adapter with transformers 4's names, and the logits that peft computes with it."""
    generator = torch.Generator().manual_seed(100)
    rank, experts, layers = 2, 6, 2
    sizes = {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}
    tensors = {}
    for layer in range(layers):
        for e in range(experts):
            for name, (into, out) in sizes.items():
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{e}.{name}"
                for half, shape in (("lora_A", (rank, into)), ("lora_B", (out, rank))):
                    tensors[f"{module}.{half}.weight"] = torch.randn(shape, generator=generator) * 0.3
    config = LoraConfig(r=rank, lora_alpha=6, target_modules=list(sizes), task_type="CAUSAL_LM", inference_mode=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    write_expected(folder, PeftModel.from_pretrained(base(OF_4), folder), OF_4)


def logits_of(model: Any, name: str) -> np.ndarray:
    """Returns the logits of the batch "rows" of the golden `name`."""
    tokens = np.load(GOLDENS / name / "expected.npz")["rows/inputs"]
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.numpy()


def write_expected(folder: Path, model: Any, name: str) -> None:
    logits = logits_of(model.eval(), name)
    change = np.abs(logits - logits_of(base(name), name)).max() / np.abs(logits).max()
    assert change > 0.05, (folder, change)
    np.savez_compressed(folder / "expected.npz", logits=logits)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder.name}: {size / 1e3:.0f} kB; the adapter changes logits by {change:.2f} of the largest")


def train(folder: Path) -> None:
    """Trains the same initial adapter once with torch's SGD and once with its AdamW. Writes the initial adapter, both
    trained ones, and the losses. The batches, random tokens from numpy's default_rng(0), are used in turn. The loss
    covers every next token of a row."""
    tokens = torch.tensor(np.random.default_rng(0).integers(0, 64, (BATCHES, ROWS, LENGTH + 1)))
    ways = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "adamw": lambda parameters: torch.optim.AdamW(
            parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        ),
    }
    losses = {}
    for name, make in ways.items():
        torch.manual_seed(0)
        model = get_peft_model(base("llama"), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        if name == "sgd":
            model.save_pretrained(folder)
        optimizer = make([it for it in model.parameters() if it.requires_grad])
        losses[name] = []
        for step in range(STEPS):
            batch = tokens[step % BATCHES]
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            losses[name].append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.save_pretrained(FOLDER / "after")
        shutil.move(FOLDER / "after" / "adapter_model.safetensors", folder / f"{name}.safetensors")
        shutil.rmtree(FOLDER / "after")
        print(f"{name}: loss {losses[name][0]:.4f} ... {losses[name][-1]:.4f}")
    (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


def check(written: Path) -> None:
    """Loads the adapters in `written` with peft, and compares their logits with the expected ones."""
    for name in [*CASES, OF_4]:
        golden = CASES[name].base if name in CASES else OF_4
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = PeftModel.from_pretrained(base(golden), written / name).eval()
        logits, expected = logits_of(model, golden), np.load(FOLDER / name / "expected.npz")["logits"]
        off = np.abs(logits - expected).max() / np.abs(expected).max()
        keys = [str(it.message)[:200] for it in said if "adapter keys" in str(it.message)]
        print(f"{name}: {off:.1e} of the largest logit{'; '.join(['', *keys])}")


if __name__ == "__main__":
    main()
