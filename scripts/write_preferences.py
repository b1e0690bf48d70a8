"""Writes tests/preferences/trl.json: 50 steps of TRL's DPO and ORPO on the model of tests/goldens/llama.

    pip install trl==1.16.0 torch && python scripts/write_preferences.py

Random pairs of random lengths come from numpy's default_rng(0). Each SGD step uses the next four, in order; after the
last pair, the first follows. The file has the pairs as token ids and, for each run, its arguments and the loss and
rewards of each step.

Each pair is a microbatch, for two reasons. TRL's ORPO weights the likelihood of each answer in a batch by the number of
its tokens. TRL's DPO ignores label_smoothing with loss_type=sigmoid, so the smoothed run uses loss_type=aot. This loss
sorts the pairs of a batch; for a batch of one pair it equals DPO's smoothed loss.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

MODEL = Path(__file__).parent.parent / "tests" / "goldens" / "llama"
FILE = Path(__file__).parent.parent / "tests" / "preferences" / "trl.json"
STEPS, PAIRS, VOCAB, EOS = 50, 4, 64, 2
RUNS: dict[str, tuple[str, dict[str, Any], float]] = {
    "dpo": ("dpo", {"beta": 0.1}, 0.05),
    "dpo-smoothed": ("dpo", {"beta": 0.5, "label_smoothing": 0.1, "loss_type": ["aot"]}, 0.003),
    "orpo": ("orpo", {"beta": 0.3}, 0.02),
}
REWARDS = ("chosen", "rejected", "margins", "accuracies")


def pairs() -> list[dict[str, list[int]]]:
    """Returns 8 x PAIRS pairs, each with a prompt of 1 to 11 tokens and two answers of 2 to 12 tokens that end with
    EOS."""
    rng = np.random.default_rng(0)

    def some() -> list[int]:
        return rng.integers(3, VOCAB, rng.integers(1, 12)).tolist()

    return [{"prompt": some(), "chosen": [*some(), EOS], "rejected": [*some(), EOS]} for _ in range(8 * PAIRS)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that has a word for each id."""
    inner = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<1>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=f"<{EOS}>", pad_token="<0>")


class InOrder:
    """Makes a trainer read pairs in order and record each loss."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(loss.item())  # type: ignore[attr-defined]
        return loss


class Dpo(InOrder, DPOTrainer):
    def found(self) -> dict[str, list[float]]:
        return {name: list(self._metrics["train"][f"rewards/{name}"]) for name in REWARDS}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: TRL's method would clear the metrics, which `found` returns."""


class Orpo(InOrder, ORPOTrainer):
    def found(self) -> dict[str, list[float]]:
        return {name: list(self._stored_metrics["train"][f"rewards/{name}"]) for name in REWARDS}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: TRL's method would clear the metrics, which `found` returns."""


def run(algo: str, arguments: dict[str, Any], rate: float, folder: str) -> dict[str, list[float]]:
    """Trains with TRL, and returns the loss and the rewards of each step."""
    every = (pairs() * STEPS)[: STEPS * PAIRS]
    texts = [{name: "".join(f" <{i}>" for i in ids) for name, ids in pair.items()} for pair in every]
    model = LlamaForCausalLM.from_pretrained(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    config = (DPOConfig if algo == "dpo" else ORPOConfig)(
        output_dir=folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=PAIRS,
        max_steps=STEPS,
        max_grad_norm=0,
        max_length=64,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=STEPS,
        **arguments,
    )
    trainer = (Dpo if algo == "dpo" else Orpo)(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.losses = []
    trainer.train()
    values = {"loss": trainer.losses, **trainer.found()}
    assert all(len(every) == STEPS * PAIRS for every in values.values()), values
    return {name: np.reshape(every, (STEPS, -1)).mean(1).tolist() for name, every in values.items()}


def main() -> None:
    """Writes trl.json."""
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    found: dict[str, Any] = {"versions": versions, "pairs": pairs(), "runs": {}}
    for name, (algo, arguments, rate) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            values = run(algo, arguments, rate, folder)
        found["runs"][name] = {"algo": algo, **arguments, "learning_rate": rate, "values": values}
        print(name, *(f"{key} {every[0]:.4f} ... {every[-1]:.4f}" for key, every in values.items()))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
