"""Packed rows in a TFDS dataset of ArrayRecord files, written as they come and read without TensorFlow."""

import contextlib
import io
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trainer.data.batches import Batch, make_batch
from trainer.data.example_proto import serialize_example
from trainer.data.packing import PackedRow

SPLIT = "rows"
SHARD_BYTES = 256 << 20


class StoredRows:
    """What `write` wrote, as a source of rows."""

    def __init__(self, folder: Path):
        import tensorflow_datasets as tfds

        self._source = tfds.builder_from_directory(folder).as_data_source(SPLIT)
        self._names = tuple(name for name in ("inputs", "targets", "segmentation", "loss") if name in self._features)
        self.size = len(self._source)
        self.length: int = self._features["inputs"].shape[0]

    @property
    def _features(self):
        return self._source.dataset_info.features

    def rows(self, indices: np.ndarray) -> Batch:
        """The rows at `indices` [n], a batch without `row`."""
        examples = self._source.__getitems__(indices.tolist())
        return make_batch(*(np.stack([example[name] for example in examples]) for name in self._names))


def write(folder: Path, rows: Iterable[PackedRow], *, length: int, vocab_size: int, masked: bool) -> Path:
    """Writes `rows` below `folder`, in their order and in bounded memory, and returns the dataset's own folder.

    Ids are stored in 16 bits where they and the row's length fit. `masked` says whether some targets bear no loss.
    Raises OSError where the disk is full.
    """
    import tensorflow_datasets as tfds

    dtype = np.uint16 if max(vocab_size, length) <= 1 << 16 else np.int32
    feature = tfds.features.Tensor(shape=(length,), dtype=dtype, encoding="bytes")
    features = dict.fromkeys(("inputs", "targets", "segmentation"), feature)
    if masked:
        features["loss"] = tfds.features.Tensor(shape=(length,), dtype=np.uint8, encoding="bytes")

    dtypes = {name: np.dtype(feature.np_dtype) for name, feature in features.items()}

    class PackedRows(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        # Next to the code TFDS would look for checksums of downloads, with a package that it does not declare.
        code_path = None
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            raise NotImplementedError("the rows are written by _download_and_prepare")

        def _generate_examples(self):
            raise NotImplementedError("the rows are written by _download_and_prepare")

        def _download_and_prepare(self, dl_manager, download_config):
            # TFDS's own writer holds a whole split, in memory and then in files that TensorFlow writes.
            template = self._get_filename_template(SPLIT)
            lengths, size = _write_shards(Path(template.data_dir), rows, dtypes)
            for i in range(len(lengths)):
                final = template.sharded_filepath(shard_index=i, num_shards=len(lengths))
                _shard(Path(template.data_dir), i).rename(str(final))
            info = tfds.core.SplitInfo(SPLIT, lengths, size, template)
            self.info.set_splits(tfds.core.SplitDict([info]))

    tfds.display_progress_bar(False)
    # TFDS prints two lines about downloads; there are none.
    with contextlib.redirect_stdout(io.StringIO()):
        builder = PackedRows(data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
    shutil.rmtree(folder / "downloads", ignore_errors=True)  # empty
    return Path(builder.data_dir)


def _write_shards(folder: Path, rows: Iterable[PackedRow], dtypes: dict[str, np.dtype]) -> tuple[list[int], int]:
    """Rows of each shard, and the bytes of all."""
    from array_record.python.array_record_module import ArrayRecordWriter

    lengths: list[int] = []
    total = room = 0
    writer = None
    try:
        for row in rows:
            if room <= 0:
                if writer is not None:
                    writer.close()
                writer, room = ArrayRecordWriter(str(_shard(folder, len(lengths))), "group_size:1"), SHARD_BYTES
                lengths.append(0)
            data = serialize_example({name: row[name].astype(dtype).tobytes() for name, dtype in dtypes.items()})
            writer.write(data)  # type: ignore[union-attr]
            lengths[-1], total, room = lengths[-1] + 1, total + len(data), room - len(data)
    except RuntimeError as error:
        raise _disk_error(error) from error
    finally:
        if writer is not None:
            try:
                writer.close()
            except RuntimeError as error:
                raise _disk_error(error) from error
    return lengths, total


def _disk_error(error: RuntimeError) -> Exception:
    """What Python calls an OSError, from ArrayRecord's words for it; else `error` itself."""
    return OSError(str(error)) if "write() failed" in str(error) else error


def _shard(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05}.tmp"
