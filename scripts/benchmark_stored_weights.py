"""Quantizes the weights of trained default models in several ways, and prints a table of losses and divergences.

    python scripts/benchmark_stored_weights.py FOLDER [--steps N] [--rows N]

A model is trained with each of SEEDS, unless FOLDER already contains its run. The loss and the mean Kullback-Leibler
divergence from the float model's distribution, in nats, are measured on --rows held-out rows of text.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from trainer import quantize, train
from trainer.backends.registry import make_model
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.data.batches import eval_batches
from trainer.data.dataset import open_dataset
from trainer.leaves.source import joined, parted
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import load_model_keys
from trainer.weights.open import open_source

SEEDS = (0, 1, 2)
GROUP = "weight_block_size=[32,1]"
WAYS = {
    "int8": ["quantization=int8"],
    "fp8": ["quantization=fp8"],
    "int4, rounding": ["quantization=int4", GROUP],
    "int4, AWQ": ["quantization=int4", GROUP, "weight_quantization_algorithm=awq"],
    "int4, GPTQ": ["quantization=int4", GROUP, "weight_quantization_algorithm=gptq"],
    "int4, zero points": ["quantization=int4", GROUP, "weight_quantization_calibration_method=minmax"],
    "nf4": ["quantization=nf4", GROUP],
    "int8, AWQ": ["quantization=int8", GROUP, "weight_quantization_algorithm=awq"],
    "int8, GPTQ": ["quantization=int8", GROUP, "weight_quantization_algorithm=gptq"],
    "int8, groups": ["quantization=int8", GROUP],
}


def trained(folder: Path, seed: int, steps: int) -> Path:
    """Returns the folder of a run, which is trained first unless it is complete."""
    run = folder / f"seed{seed}-{steps}"
    if not (run / "checkpoints" / str(steps)).exists():
        keys = {"init_weights_seed": seed, "data_shuffle_seed": seed, "steps": steps, "eval_interval": -1, "prompt": ""}
        keys |= {"base_output_directory": folder, "run_name": run.name}
        train.main(["base.yml", *(f"{key}={value}" for key, value in keys.items())])
    return run


def batches(path: Path, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields held-out rows, in batches of 8."""
    config = load(["base.yml", f"tokenizer_path={open_source(str(path)).tokenizer}"]).config
    held_out = open_dataset(resolve(config, device_count=1, platform="cpu"), print).evaluation
    assert held_out is not None
    yield from eval_batches(held_out, 8, rows // 8)


def logits_of(path: Path) -> Any:
    """Returns a function that maps a batch to the log-probabilities [b, t, v] of the model in `path`."""
    source = open_source(str(path))
    config = resolve(load_model_keys(source.keys, [], str(path)).config, device_count=1, platform="cpu")
    model, device = make_model(config), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = joined(*model.abstract)
    abstract = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype, sharding=device), weights)
    params, rest = parted(load_parameters(str(path), config, abstract, print), model.abstract[1])

    @jax.jit
    def run(batch: dict[str, jax.Array]) -> jax.Array:
        inputs = (batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row"))
        hidden, _, _ = model.apply(params, rest, *inputs)
        return jax.nn.log_softmax(model.apply(params, rest, hidden, method="head")[0].astype(jnp.float32))

    return run


def measured(run: Path, ways: dict[str, Path], rows: int) -> dict[str, tuple[float, float]]:
    """Returns a dict from the name of each model in `ways`, and from "" for the float model in `run`, to the (loss,
    divergence) of the model."""
    models = {name: logits_of(path) for name, path in {"": run, **ways}.items()}
    losses, divergences, tokens = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0.0), 0
    for batch in batches(run, rows):
        real = batch["targets_segmentation"] != 0
        tokens += int(real.sum())
        reference = np.asarray(models[""](batch), np.float64)
        for name, model in models.items():
            found = np.asarray(model(batch), np.float64)
            losses[name] -= float(np.take_along_axis(found, batch["targets"][..., None], -1)[..., 0][real].sum())
            divergences[name] += float((np.exp(reference) * (reference - found)).sum(-1)[real].sum())
    return {name: (losses[name] / tokens, divergences[name] / tokens) for name in models}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--rows", type=int, default=256)
    words = parser.parse_args()
    found: list[dict[str, tuple[float, float]]] = []
    for seed in SEEDS:
        run = trained(words.folder, seed, words.steps)
        ways = {name: run.with_name(f"{run.name}-{name.replace(', ', '-').replace(' ', '-')}") for name in WAYS}
        for name, path in ways.items():
            if not path.exists():
                quantize.main([str(run), str(path), *WAYS[name]])
        found.append(measured(run, ways, words.rows))
    print(f"| stored as | loss, {len(SEEDS)} seeds | against float | divergence from float, 0.001 nats |")
    print("|---|---|---|---|")
    for name in found[0]:
        losses = [one[name][0] for one in found]
        ratios = [100 * (loss / one[""][0] - 1) for loss, one in zip(losses, found, strict=True)]
        divergence = ", ".join(f"{1000 * one[name][1]:.3g}" for one in found)
        print(
            f"| {name or 'float32'} | {statistics.mean(losses):.4f} | {', '.join(f'{it:+.3f} %' for it in ratios)} | "
            f"{divergence} |"
        )


if __name__ == "__main__":
    main()
