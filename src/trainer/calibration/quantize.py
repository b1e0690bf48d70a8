"""Quantizes the weights of a checkpoint, calibrated on text. Quantized arrays are kept in files, not in memory."""

import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.calibration.layerwise import calibrate
from trainer.calibration.recording import Statistics
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves.source import Leaf, names_of, nested
from trainer.products.calibrated import How, awq, gptq, values
from trainer.products.dequantized import Storage
from trainer.products.plain import Kernel

Say = Callable[[str], None]


class Calibrated:
    """The quantized kernels of a model, in temporary files. As a context manager, it removes the files at exit."""

    def __init__(self, kernels: Mapping[str, Kernel], storage: Storage, folder: Path):
        """`folder`: the folder for temporary files. They take at most as much space as the float model and the
        quantized model together."""
        self._kernels, self._storage = kernels, storage
        self._folder = tempfile.TemporaryDirectory(prefix="calibration-", dir=folder)
        self._found: dict[str, dict[str, np.ndarray]] = {}

    def __enter__(self) -> "Calibrated":
        return self

    def __exit__(self, *error: object) -> None:
        self._found.clear()
        self._folder.cleanup()

    def run(
        self,
        config: Config,
        stored: Mapping[str, Any],
        leaves: Mapping[str, Leaf],
        batches: Iterable[Mapping[str, Any]],
        algorithm: str,
        say: Say,
    ) -> None:
        """Quantizes all kernels.

        Args:
          config: the resolved configuration of the float model.
          stored: a dict from the canonical name of each kernel to a pytree of ShapeDtypeStructs that describes the
            kernel's stored form.
          leaves: the float weights and the buffers, by canonical name.
          batches, say: see `calibrate`.
          algorithm: "awq" or "gptq".
        """
        quantize = functools.partial(self._quantize, algorithm)
        rest = {name: leaf.read(leaf.dtype, _nothing) for name, leaf in leaves.items() if leaf.buffer}
        reader = _Reader(leaves, Path(self._folder.name))
        hessian = algorithm == "gptq"
        for layer in calibrate(
            config, batches, reader.read, nested(rest), quantize, self._kernels.__contains__, hessian=hessian, say=say
        ):
            for name, value in layer.stored.items():
                whole = self._of(name, stored[name])
                for part, array in names_of(nested({name: value})).items():
                    whole[part][... if layer.number is None else layer.number] = array
            del layer  # frees the layer's hidden states

    def leaves(self, name: str) -> dict[str, np.ndarray]:
        """Returns the arrays of a kernel's stored form by name, memory-mapped; {} if the kernel was not calibrated."""
        return self._found.get(name, {})

    def _of(self, name: str, stored: Any) -> dict[str, np.ndarray]:
        if name not in self._found:
            parts = names_of(nested({name: stored}))
            self._found[name] = {
                part: _on_disk(Path(self._folder.name), it.shape, it.dtype) for part, it in parts.items()
            }
        return self._found[name]

    def _quantize(self, algorithm: str, name: str, value: jax.Array, found: Statistics) -> tuple[Any, jax.Array]:
        kernel, storage = self._kernels[name], self._storage
        how = How(storage.dtype, storage.of_inputs(kernel), storage.method)
        if algorithm == "awq":
            quantized, scales = awq(value, found.mean_abs(), how, name)
            return storage.of_matrix(kernel, quantized, scales), values(quantized, scales)
        assert found.hessian is not None
        quantized = gptq(value, found.hessian, how, name)
        return storage.of_matrix(kernel, quantized), values(quantized)


class _Reader:
    """Reads the float weights of one layer at a time."""

    def __init__(self, leaves: Mapping[str, Leaf], folder: Path):
        self._leaves, self._folder = leaves, folder
        self._whole: dict[str, np.ndarray] = {}

    def read(self, path: str, number: int | None) -> dict[str, Any]:
        below = {
            name.removeprefix(f"{path}/"): name
            for name, leaf in self._leaves.items()
            if name.startswith(f"{path}/") and not leaf.buffer
        }
        return nested({part: self._one(name, number) for part, name in below.items()})

    def _one(self, name: str, number: int | None) -> np.ndarray:
        leaf = self._leaves[name]
        if number is None:
            return leaf.read(leaf.dtype, _nothing)
        if len(leaf.parts) == leaf.shape[0] > 1:  # layers are stored one by one
            return leaf.parts[number]().reshape(leaf.shape[1:])
        if name not in self._whole:  # the layers are stored as one array, so it is read completely, but only once
            self._whole[name] = _on_disk(self._folder, leaf.shape, leaf.dtype)
            self._whole[name][...] = leaf.read(leaf.dtype, _nothing)
        return np.array(self._whole[name][number])


def _on_disk(folder: Path, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array that is memory-mapped to a new file. NumPy cannot map every dtype, so the file is mapped as
    bytes and then viewed as `dtype`.

    Raises:
      UserError: the disk is too full.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise UserError(f"{folder}: not enough disk space for {size / 1e9:.2f} GB: {error.strerror}") from error
        return np.memmap(file, np.uint8, "r+", shape=(size,)).view(dtype).reshape(shape)


def _nothing(size: int) -> None:
    """A progress callback that ignores the number of bytes read."""
