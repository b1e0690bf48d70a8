"""The sidecar metadata of a checkpoint. The metadata describe the checkpoint's arrays and run, so that no other file is
needed to use the checkpoint."""

import json
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

import yaml

from trainer.checkpoint.sums import damaged, read_part
from trainer.config.plain_yaml import read_text
from trainer.config.saved import read_saved
from trainer.runtime.folders import read_bounded
from trainer.runtime.storage import files_below
from trainer.runtime.versions import installed

CONFIG, DATA, METRICS, TOKENIZER = "config.yml", "data.json", "metrics.json", "tokenizer"


class Base(NamedTuple):
    """Parameters that a run reads but neither changes nor saves."""

    path: str  # the folder that contains the parameters; "" for initial values from init_weights_seed
    digests: Mapping[str, Mapping[str, str]]  # hashes of the values; see `trainer.checkpoint.base.digests`


class Sidecar(NamedTuple):
    """The content of checkpoints/N/run."""

    config: str  # config.yml: the resolved configuration
    position: Any  # JSON: the position in the data after the last batch that the state was trained on
    fingerprint: str  # the fingerprint of the data and the tokenizer to which `position` refers
    tokenizer: Mapping[str, bytes]  # files of the tokenizer and of the model's metadata, by path below TOKENIZER
    versions: Mapping[str, str] = installed()  # see `runtime.versions`; empty if the checkpoint has none
    base: Base | None = None  # the base model, which the checkpoints of a run with adapters omit
    reference: Base | None = None  # the values of the trained parameters in the run's reference model, if any


class SidecarFiles:
    """A `Sidecar` as Orbax's StatefulCheckpointable: files in a folder of the checkpoint, committed with the arrays."""

    def __init__(self, sidecar: Sidecar, metrics: Mapping[str, float] | None = None):
        self._sidecar, self._metrics = sidecar, dict(metrics or {})

    async def save(self, directory: Any) -> Awaitable[None]:
        """Returns the write operation, which Orbax awaits in its background thread."""
        return self._write(directory)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Completes Orbax's protocol. Orbax never calls it, because no restore uses a `SidecarFiles`."""
        raise TypeError("read_sidecar reads these files")

    async def _write(self, directory: Any) -> None:
        folder = await directory.await_creation()
        sidecar, index = self._sidecar, _process_index()
        data = {"position": sidecar.position, "fingerprint": sidecar.fingerprint, "versions": dict(sidecar.versions)}
        for name in ("base", "reference"):
            if (found := getattr(sidecar, name)) is not None:
                data[name] = found._asdict()
        (folder / _data_file(index)).write_text(json.dumps(data) + "\n", encoding="utf-8")
        if index != 0:
            return
        (folder / CONFIG).write_text(sidecar.config, encoding="utf-8")
        (folder / METRICS).write_text(json.dumps(self._metrics) + "\n", encoding="utf-8")
        (folder / TOKENIZER).mkdir()
        for name, content in sidecar.tokenizer.items():
            (folder / TOKENIZER / name).parent.mkdir(exist_ok=True)
            (folder / TOKENIZER / name).write_bytes(content)


def read_sidecar(folder: Any) -> Sidecar:
    """Reads `folder`, a folder checkpoints/N/run, including this process's position in the data if there is one."""
    own = folder / _data_file(_process_index())
    data = read_part(folder, own.name if own.is_file() else DATA)
    if not isinstance(data.get("fingerprint"), str):
        raise damaged(folder, DATA, "has no fingerprint of the data")
    versions = data.get("versions", {})
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        raise damaged(folder, DATA, "has versions that are not a mapping of names to strings")
    names = [name for name in files_below(folder / TOKENIZER) if name[0] != "."]
    tokenizer = {name: read_bounded(folder / TOKENIZER / name) for name in names}
    others = (_base(folder, data, name) for name in ("base", "reference"))
    return Sidecar(read_config(folder), data.get("position"), data["fingerprint"], tokenizer, versions, *others)


def read_config(folder: Any) -> str:
    """Reads config.yml in checkpoints/N/run. Raises UserError if it cannot be read."""
    try:
        return read_text(folder / CONFIG)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise damaged(folder, CONFIG, f"cannot be read ({error})") from error


def _base(folder: Any, data: Mapping[str, Any], name: str) -> Base | None:
    if (found := data.get(name)) is None:
        return None
    path, digests = (found.get("path"), found.get("digests")) if isinstance(found, dict) else (None, None)
    if not isinstance(path, str) or not isinstance(digests, dict) or "bfloat16" not in digests:
        raise damaged(folder, DATA, f"has an invalid description of its {name}")
    if not all(isinstance(of_names, dict) for of_names in digests.values()):
        raise damaged(folder, DATA, f"has malformed hashes of its {name}")
    return Base(path, digests)


def _data_file(process: int) -> str:
    """Returns the name of the file that contains the position of a process in the data.

    With streamed data, each process has a separate position. Prepared data have a single position, in process 0's file.
    """
    return DATA if process == 0 else f"data-{process}.json"


def _process_index() -> int:
    import jax

    return jax.process_index()


def saved_config(sidecar: Sidecar, where: Any) -> dict[str, Any]:
    """Returns the resolved configuration in the sidecar of the checkpoint `where`, as a dict from keys to values.

    Raises:
      UserError: the checkpoint's config.yml is not a configuration.
    """
    return read_saved(sidecar.config, f"{where}/{CONFIG}")
