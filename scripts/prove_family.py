"""Compares your own model family with Hugging Face's transformers, on a small model.

    pip install -e ".[goldens]" && python scripts/prove_family.py PACKAGE.facts:FACTS FOLDER

PACKAGE.facts:FACTS is the value of decoder_block for your family (docs/guides/extending.md). PACKAGE must be in the
current folder or in PYTHONPATH. FOLDER has a random model written by save_pretrained. Its vocabulary needs at least 64
tokens; its sliding windows and chunks, if it has any, must be shorter than 20 tokens.

The script compares logits and gradients, once for rows of one document and once for packed rows, whose documents
transformers computes one by one. For the logits, and for the gradient that differs most, it prints the largest
difference relative to the largest entry. It also prints the names of tensors that import and export do not preserve bit
for bit. The exit code is 1 if there are such tensors, or if a difference exceeds its tolerance.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

import jax
import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from write_goldens import LENGTH, by_document, gradients, packed, rows

from trainer.backends.registry import make_model
from trainer.config.resolve import resolve
from trainer.leaves.source import Leaf, joined, names_of, parted
from trainer.objectives.next_token import NextToken
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source

TOLERANCES = {"logits": 1e-5, "gradient": 5e-5}  # rounding alone caused 2.8e-6 and 1.4e-5
Arrays = dict[str, np.ndarray]


def theirs(folder: str, batch: Arrays) -> Arrays:
    """Returns the logits and gradients of transformers' model. Gradients have the names of the model's tensors."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = {name: torch.tensor(array, dtype=torch.long) for name, array in batch.items()}
    logits, counts = by_document(model, tokens), tokens["targets_segmentation"] != 0
    cross_entropy(logits[counts], tokens["targets"][counts]).backward()
    return {"logits": logits.detach().numpy(), **gradients(model)}


class Ours:
    """This trainer's model with the parameters in a folder."""

    def __init__(self, block: str, folder: str):
        words = [f"decoder_block={block}", f"max_target_length={LENGTH}", "dtype=float32", "remat_policy=none"]
        keys = model_config(open_source(folder, block).keys, words, folder)
        self.config = resolve(keys, device_count=1, platform="cpu")
        self.model = make_model(self.config)
        on_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        params, rest = jax.tree.map(lambda leaf: leaf.update(sharding=on_one), self.model.abstract)
        self.params, self.rest = parted(load_parameters(folder, self.config, joined(params, rest), print), rest)

    def computed(self, batch: Arrays) -> Arrays:
        """Returns logits and gradients. Gradients have the names of Hugging Face's tensors."""

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def both(params: Any, batch: Any) -> Any:
            outputs = []

            def apply(*args: Any, **how: Any) -> Any:
                outputs.append(self.model.apply(*args, **how))
                return outputs[-1]

            objective = NextToken(apply)
            sums = objective.sums(params, self.rest, batch, None).minimized
            return sums["lm_loss"] / objective.weights(batch).tokens, outputs[-1][0]  # the last output is the head's

        slopes, logits = both(self.params, batch | {"row": np.arange(len(batch["inputs"]), dtype=np.int32)})
        return {"logits": np.asarray(logits), **self.tensors(names_of(slopes))}

    def tensors(self, arrays: dict[str, Any]) -> Arrays:
        """Converts arrays with canonical names to the tensors that an export writes."""
        arrays = {name: np.asarray(array) for name, array in arrays.items()}
        leaves = {name: Leaf(it.shape, it.dtype, [functools.partial(np.asarray, it)]) for name, it in arrays.items()}
        with tempfile.TemporaryDirectory() as folder:
            write_huggingface(Path(folder), self.config, leaves, None)
            return load_file(Path(folder) / "model.safetensors")


def main() -> int:
    """Compares the family and the folder that the command line names. Returns the exit code."""
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    block, folder = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    ours, failed = Ours(block, folder), False
    for name, batch in {"rows": rows(0), "packed": packed(0)}.items():
        found, expected = ours.computed(batch), theirs(folder, batch)
        real = batch["inputs_segmentation"] != 0  # results for padding do not matter
        found["logits"], expected["logits"] = found["logits"][real], expected["logits"][real]
        shares = {it: np.abs(found[it] - array).max() / np.abs(array).max() for it, array in expected.items()}
        for kind, tolerance in TOLERANCES.items():
            worst = max((it for it in shares if (it == "logits") == (kind == "logits")), key=lambda it: shares[it])
            failed |= not shares[worst] <= tolerance
            print(f"{name:<7} {kind:<9} {shares[worst]:.1e}  {worst if kind == 'gradient' else ''}")
    saved = {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}
    back = ours.tensors(names_of(joined(ours.params, ours.rest)))
    other = saved.keys() ^ back.keys()
    other |= {it for it in saved.keys() & back.keys() if not np.array_equal(saved[it], back[it])}
    print("weights bit for bit" if not other else f"not bit for bit: {', '.join(sorted(other))}")
    return int(failed or bool(other))


if __name__ == "__main__":
    raise SystemExit(main())
