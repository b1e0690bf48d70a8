"""Writes tests/distillation: a random teacher, and the losses of 30 steps in which TRL's GKD trains tests/goldens/llama
with the teacher.

    pip install trl==1.16.0 torch && python scripts/write_distillation.py

Random sequences of random lengths come from numpy's default_rng(0). Each SGD step uses the next four, in order; after
the last sequence, the first follows. trl.json has the sequences as token ids and, for each run, its arguments and the
loss of each step. The loss is the sum of the divergences over the batch's completion tokens, in nats, divided by the
number of those tokens; prompt tokens do not contribute. TRL's lmbda is 0, so the student generates no sequences.

TRL's GKDTrainer divides logits by the temperature only when it generates. The subclass in this script also passes the
temperature to TRL's divergence. The divergence divides both models' logits by the temperature, but does not multiply
the loss by the temperature's square.
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
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.gkd import GKDConfig, GKDTrainer

TESTS = Path(__file__).parent.parent / "tests"
STUDENT = TESTS / "goldens" / "llama"
FOLDER = TESTS / "distillation"
TEACHER = FOLDER / "teacher"
STEPS, BATCH, BATCHES, VOCAB, EOS, PAD = 30, 4, 5, 64, 2, 0
RUNS = {
    "forward": ({"beta": 0.0, "temperature": 1.0}, 0.2),
    "reverse": ({"beta": 1.0, "temperature": 1.0}, 0.05),
    "jensen-shannon-0.5": ({"beta": 0.5, "temperature": 1.0}, 1.0),
    "jensen-shannon-0.3": ({"beta": 0.3, "temperature": 1.0}, 1.0),
    "forward-temperature-2": ({"beta": 0.0, "temperature": 2.0}, 0.5),
    "jensen-shannon-0.3-temperature-2": ({"beta": 0.3, "temperature": 2.0}, 2.0),
}


def sequences() -> list[dict[str, list[int]]]:
    """Returns BATCHES x BATCH sequences, each with a prompt of 1 to 11 tokens and a completion of 2 to 12 that ends
    with EOS."""
    rng = np.random.default_rng(0)

    def some() -> list[int]:
        return rng.integers(3, VOCAB, rng.integers(1, 12)).tolist()

    return [{"prompt": some(), "completion": [*some(), EOS]} for _ in range(BATCHES * BATCH)]


def write_teacher() -> None:
    """Writes a random model that is wider and deeper than the student."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    generator = torch.Generator().manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    model.save_pretrained(TEACHER)
    (TEACHER / "generation_config.json").unlink()


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Returns ids, masks and labels [BATCH, length of the longest sequence], padded on the right."""
    ids = [torch.tensor(row["prompt"] + row["completion"]) for row in rows]
    labels = [torch.tensor([-100] * len(row["prompt"]) + row["completion"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


class InOrder(GKDTrainer):
    """Reads sequences in order, records each loss, and passes the temperature to the divergence."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def generalized_jsd_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().generalized_jsd_loss(*args, temperature=self.temperature, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def run(arguments: dict[str, float], rate: float, folder: str) -> list[float]:
    """Trains the student, and returns the loss of each step."""
    model = LlamaForCausalLM.from_pretrained(STUDENT)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<1>"))
    trainer = InOrder(
        model=model,
        teacher_model=LlamaForCausalLM.from_pretrained(TEACHER),
        args=GKDConfig(
            output_dir=folder,
            lmbda=0.0,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            max_grad_norm=0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            **arguments,
        ),
        data_collator=collate,
        train_dataset=Dataset.from_list(sequences()),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"<{EOS}>", pad_token=f"<{PAD}>"),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.losses = []
    trainer.train()
    assert len(trainer.losses) == STEPS, trainer.losses
    return [float(f"{loss:.8g}") for loss in trainer.losses]


def main() -> None:
    """Writes the teacher and trl.json."""
    write_teacher()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    found: dict[str, Any] = {"versions": versions, "batch": BATCH, "sequences": sequences(), "runs": {}}
    for name, (arguments, rate) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            losses = run(arguments, rate, folder)
        found["runs"][name] = {**arguments, "learning_rate": rate, "losses": losses}
        passes = np.reshape(losses, (-1, BATCHES)).mean(1)
        print(name, *(f"{loss:.4f}" for loss in passes))
    (FOLDER / "trl.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
