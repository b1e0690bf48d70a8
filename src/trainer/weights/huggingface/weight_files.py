"""The files with a model's weights in a Hugging Face directory, and the tensors in these files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import read_object, shown
from trainer.config.paths import path_problem
from trainer.weights.huggingface.safetensors_file import StoredTensor, stored_tensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"  # PEFT's adapter, which may be in its base's folder
BUFFER = "rotary_emb.inv_freq"  # a buffer in old folders that can be computed from config.json
_FORMS = ("*.safetensors", "pytorch_model*.bin")  # files that may contain weights
_MOST = 20  # the maximum number of lines in a message, and of names in a line
_STRIP = 1 << 25  # bytes to compare at once


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files with the model's weights; [] if there are none.

    As in transformers, the files are the first of the following that exists: the files in an index that lists
    model.safetensors; model.safetensors; the files in any other index; the only safetensors file.

    Raises:
      UserError: there are several files and no index, or the index lists names that are not files of the directory.
    """
    names = sorted(set(_weight_map(path).values()))
    if (path / SINGLE).is_file() and SINGLE not in names:
        names = [SINGLE]
    if names:
        return [path / name for name in names]
    files = sorted(file for file in path.glob("*.safetensors") if file.name != PEFT_WEIGHTS)
    if len(files) > 1:
        raise UserError(f"{path}: {len(files)} safetensors files, but no {INDEX} that lists those of the model")
    return files


def other_forms(path: Path) -> str:
    """Returns a line about files that may contain weights but are not read; "" if there are none."""
    read = [file.name for file in weight_files(path)]
    names = sorted({file.name for form in _FORMS for file in path.glob(form)} - set(read))
    if not names:
        return ""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    adapter = "; the adapter is not added to the weights" if PEFT_WEIGHTS in names else ""
    first = read[0] if len(read) == 1 else f"the {len(read)} files of {INDEX}"
    return f"weights are read from {first}, not from {', '.join(map(shortened, names[:_MOST]))}{more}{adapter}"


def model_tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors in `weight_files(path)` by name. If several files contain a tensor, returns the copy in the
    file that the index names. Values are read only to compare such copies.

    Raises:
      UserError: a file is damaged, or the index and the files contradict each other.
    """
    files, index = weight_files(path), _weight_map(path)
    found = _by_file(path, files)
    if not index or files == [path / SINGLE]:
        return next(iter(found.values()), {})
    problems = []
    for name, file in index.items():
        other = next((other for other, tensors in found.items() if name in tensors), "")
        if other and name not in found[file]:  # a tied head may be in no file; other tensors are checked later
            problems.append(f"{shortened(name)} is assigned to {file}, which has no such tensor; it is in {other}")
    for file, tensors in found.items():
        for name, tensor in tensors.items():
            home = index.get(name)
            if home is None and not name.endswith(BUFFER):
                problems.append(f"{shortened(name)} is in {file}, but not in the index")
            elif home not in (None, file) and name in found[home] and not _same(tensor, found[home][name]):
                problems.append(f"{shortened(name)} in {file} differs from the one in {home}, which the index names")
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise UserError("\n  ".join([f"{path / INDEX} and its files contradict each other:", *problems[:_MOST], *more]))
    return {name: found[file][name] for file in found for name in found[file] if index.get(name) == file}


def tensors_in(path: Path, file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name, without reading them. `path` is the path that the user gave.

    Raises:
      UserError: the file is damaged.
    """
    return _by_file(path, [file])[file.name]


def _by_file(path: Path, files: Iterable[Path]) -> dict[str, dict[str, StoredTensor]]:
    from safetensors import SafetensorError

    found: dict[str, dict[str, StoredTensor]] = {}
    problems = []
    for file in files:
        try:
            found[file.name] = stored_tensors(file)
        except (OSError, SafetensorError) as error:
            problems.append(f"{file}: {shortened(str(error))}")
    if problems:
        raise UserError("\n  ".join([f"{path}: weights cannot be read:", *problems]))
    return found


def _weight_map(path: Path) -> Mapping[str, str]:
    """Returns the file name that the index gives for each tensor; {} if there is no index."""
    if not (path / INDEX).is_file():
        return {}
    found = read_object(path / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path / INDEX}: no weight_map")
    for tensor, name in found.items():
        if not _is_file_name(name):
            raise UserError(
                f"{path / INDEX} assigns {shortened(tensor)} to {shown(name)}, which is not the name of a file in "
                "this directory"
            )
    return found


def _is_file_name(name: Any) -> bool:
    plain = isinstance(name, str) and "/" not in name and name not in ("", ".", "..")
    return plain and path_problem(f"a/{name}") is None


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bytes. Reads both."""
    if (one.kind, one.shape) != (other.kind, other.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = [min(_STRIP, one.nbytes - at) for at in range(0, one.nbytes, _STRIP)]
        return all(first.read(size) == second.read(size) for size in sizes)
