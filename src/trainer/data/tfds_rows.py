"""Packed rows in a TFDS dataset of ArrayRecord files, written and read without TensorFlow."""

import contextlib
import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from trainer.data.batches import Batch, make_batch

_NAMES = ("inputs", "targets", "segmentation")


class TfdsRows:
    """One split of a dataset that `write` wrote, as a source of rows."""

    def __init__(self, folder: Path, split: str):
        import tensorflow_datasets as tfds

        self._source = tfds.builder_from_directory(folder).as_data_source(split)
        self.size = len(self._source)
        self.length: int = self._source.dataset_info.features["inputs"].shape[0]

    def rows(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` [n], a batch without `row`."""
        examples = self._source.__getitems__(indices.tolist())
        return make_batch(*(np.stack([example[name] for example in examples]) for name in _NAMES))


def write(
    folder: Path, splits: dict[str, dict[str, np.ndarray]], track: Callable[[Iterable[int], int], Iterable[int]]
) -> Path:
    """Writes {split: arrays of `pack`} below `folder`, rows in their order, and returns the dataset's own folder.

    `track(indices, count)` is wrapped around the loop over a split's rows. Raises OSError where the disk is full.
    """
    import tensorflow_datasets as tfds

    first = next(iter(splits.values()))["inputs"]
    feature = tfds.features.Tensor(shape=first.shape[1:], dtype=first.dtype, encoding="bytes")

    class PackedRows(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        # Next to the code TFDS would look for checksums of downloads, with a package that it does not declare.
        code_path = None
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(dict.fromkeys(_NAMES, feature))
            # Without shuffling TFDS keeps the rows in the order of their keys.
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(arrays) for split, arrays in splits.items()}

        def _generate_examples(self, arrays):
            count = len(arrays["inputs"])
            for i in track(range(count), count):
                yield i, {name: values[i] for name, values in arrays.items()}

    tfds.display_progress_bar(False)
    # TFDS prints two lines about downloads; there are none.
    with contextlib.redirect_stdout(io.StringIO()):
        builder = PackedRows(data_dir=folder, file_format="array_record")
        try:
            builder.download_and_prepare()
        except RuntimeError as error:
            if "write() failed" in str(error):  # ArrayRecord's words for what Python calls an OSError
                raise OSError(str(error)) from error
            raise
    shutil.rmtree(folder / "downloads", ignore_errors=True)  # empty
    return Path(builder.data_dir)
