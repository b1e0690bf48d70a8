"""Configuration to the two sources of rows that a run reads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.data.batches import RowSource
from trainer.data.synthetic import EVAL_OFFSET, EVAL_ROWS, SyntheticRows

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Dataset:
    """Rows to train on, rows held out, the tokenizer (None for synthetic rows), and facts for people.

    `summary` holds `source`, and for text `folder`, `fingerprint` (sha256 of the corpus), and `train` and `validation`,
    each a dict with the numbers of `files`, `bytes`, `tokens` (those that bear loss) and `rows`.
    """

    train: RowSource
    evaluation: RowSource
    tokenizer: "Tokenizer | None"
    summary: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.summary.get("folder", "") or self.summary["source"]

    def tokenizer_files(self) -> dict[str, bytes]:
        return {} if self.tokenizer is None else {"tokenizer.json": self.tokenizer._bpe.to_str().encode()}

    def __str__(self) -> str:
        """One line for the start of a run."""
        if "folder" not in self.summary:
            return self.summary["source"]
        train, held_out = self.summary["train"], self.summary["validation"]
        return (
            f"{self.summary['source']}: {train['files']} files, {train['tokens']:,} tokens; held out "
            f"{held_out['files']} files, {held_out['tokens']:,} tokens ({self.summary['folder']})"
        )


def open_dataset(config, progress: Callable[[str], None]) -> Dataset:
    """Opens what `dataset_type` names; the first time this prepares it, with one line to `progress` per phase.

    Raises UserError where the keys, the disk or a folder prepared earlier do not allow it.
    """
    length, vocab_size = config.max_target_length, config.vocab_size
    if config.dataset_type == "synthetic":
        seed = config.data_shuffle_seed
        train = SyntheticRows(length, vocab_size, seed=seed)
        evaluation = SyntheticRows(length, vocab_size, seed=seed, offset=EVAL_OFFSET, size=EVAL_ROWS)
        return Dataset(train, evaluation, None, {"source": f"synthetic rows, {EVAL_ROWS} held out"})
    # Late: synthetic runs need neither TFDS nor a tokenizer.
    from trainer.data.cache import cache_root
    from trainer.data.corpus import stdlib_folder
    from trainer.data.stdlib import open_corpus

    prepared = open_corpus(stdlib_folder(), cache_root(config.dataset_path), vocab_size, length, progress)
    meta = prepared.meta
    summary = {
        "source": f"standard library of Python {meta['python']}",
        "folder": str(prepared.folder),
        "fingerprint": meta["fingerprint"],
        **meta["splits"],
    }
    return Dataset(prepared.train, prepared.evaluation, prepared.tokenizer, summary)
