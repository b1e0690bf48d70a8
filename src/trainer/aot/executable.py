"""Saves and loads a compiled training step, together with everything that it depends on."""

import hashlib
import json
import pickle
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import ml_collections

import trainer
from trainer.aot import sources
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.capabilities.kernels import read_documents
from trainer.config.errors import UserError
from trainer.config.json_files import parsed
from trainer.config.keys import Config
from trainer.models.families import block_class, blocks, stacks
from trainer.runtime.programs import is_mixed_up
from trainer.runtime.versions import installed
from trainer.sharding import compute_capability, slice_of

MAGIC = b"trainer-executable 1\n"
# The module that builds the step. That module and its imports count as the step's source code.
_BUILDER = "trainer.training.build"
# JAX settings that change what a traced step computes.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)

# Everything that a step depends on, as JSON-compatible nested dicts: group -> name -> value.
Origin = dict[str, dict[str, Any]]


def settings() -> dict[str, str]:
    """Returns the JAX settings that change what a traced step computes."""
    return {name: str(getattr(jax.config, name)) for name in _SETTINGS}


def origin_of(config: Config, devices: Sequence[jax.Device], args: Any) -> Origin:
    """Returns everything that a compiled step depends on.

    Args:
      config: the resolved configuration.
      devices: the devices in the order of the mesh.
      args: the step's abstract arguments, with shardings.
    """
    leaves = jax.tree_util.tree_leaves_with_path(args)
    first = devices[0]
    compiler = {"libtpu": metadata.version("libtpu")} if first.platform == "tpu" else {}
    keys = [
        *step_keys(),
        *(["steps"] if config.enable_diloco else []),  # the last step synchronizes DiLoCo's islands
        *(["decode_sampling_temperature"] if config.use_grpo else []),
        *(["sft_train_on_completion_only"] if config.use_dpo else []),
    ]
    return {
        "configuration": {name: _plain(config[name]) for name in keys}
        # If the attention kernel reads document lengths, the step depends on the maximum number of documents per row.
        # It depends on no other property of the data.
        | {"documents of a row": read_documents(config, compute_capability(devices))},
        "devices": {
            "kind": first.device_kind,
            "number": len(devices),
            "slices": len({slice_of(device) for device in devices}),
            "extent": _extent(devices),
        }
        | ({"machine": _machine()} if first.platform == "cpu" else {}),
        "versions": {**installed(), **compiler} | {"source of trainer": _source()} | source_of_block(config),
        "settings": settings(),
        "arguments": {
            jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)} {leaf.sharding.spec}" for path, leaf in leaves
        },
    }


def save(path: Path, compiled: Any, origin: Origin) -> None:
    """Writes `compiled`, a step `(state, batch, frozen) -> (state, metrics)`, to `path`.

    The file appears at `path` only when it is complete.

    Raises:
      UserError: the path cannot be written, or XLA may load the step incorrectly (see `is_mixed_up`).
    """
    from jax.experimental import serialize_executable

    if is_mixed_up(compiled, origin["devices"]["kind"], origin["devices"]["number"]):
        raise UserError(
            f"compiled_trainstep_file={path}: this step passes arrays from device to device, and XLA confuses these "
            "arrays in a loaded program for several CPU devices; leave the key out"
        )

    payload, _, out_tree = serialize_executable.serialize(compiled)
    metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))[1]
    head = {"origin": origin, "metrics": sorted(metrics), "sha256": hashlib.sha256(payload).hexdigest()}
    partial = path.with_name(f"{path.name}.incomplete")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(MAGIC + json.dumps(head).encode() + b"\n" + payload)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"compiled_trainstep_file={path}: cannot be written: {error.strerror}") from error


def load(path: Path, origin: Origin, args: Any, devices: Sequence[jax.Device]) -> Any:
    """Returns the compiled step in the file at `path`, loaded for `devices`.

    The returned step has three arguments: a list of the state's leaves, a batch, and the objective's frozen arrays.

    The file contains executable code: load only files that you trust.

    Args:
      path: the file that `save` wrote.
      origin: what the current run's step depends on (see `origin_of`).
      args: the abstract arguments (state, batch, frozen arrays).
      devices: the devices in the order of the mesh.

    Raises:
      UserError: the file cannot be read, or its step does not match `origin`; the message lists the differences.
    """
    from jax.experimental import serialize_executable

    named = f"compiled_trainstep_file={path}"
    if devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1:
        raise UserError(f"{named}: a compiled step for CPU devices can run in only one process; leave the key out")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{named}: cannot be read: {error.strerror}") from error
    head_line, _, payload = content.removeprefix(MAGIC).partition(b"\n")
    if not content.startswith(MAGIC):
        raise UserError(f"{named}: not a file that trainer.train_compile wrote")
    try:
        head = parsed(head_line)
    except ValueError as error:
        raise UserError(f"{named}: damaged, its header is not JSON; compile again") from error
    if differences := _differences(head["origin"], json.loads(json.dumps(origin))):
        lines = "\n  ".join(differences)
        raise UserError(
            f"{named} contains a different step (file -> run):\n  {lines}\ncompile again, or leave the key out"
        )
    if hashlib.sha256(payload).hexdigest() != head["sha256"]:
        raise UserError(f"{named}: damaged, its checksum does not match; compile again")
    leaves = jax.tree.leaves(args[0])
    in_tree = jax.tree.structure(((leaves, *args[1:]), {}))
    out_tree = jax.tree.structure((leaves, dict.fromkeys(head["metrics"], 0)))
    try:
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except (jax.errors.JaxRuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{named}: this JAX cannot load it: {reason}; compile again, or leave the key out") from error


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for group, values in here.items():
        old = there.get(group, {})
        if group == "arguments" and lines:
            break  # arguments differ because of the differences found so far
        changed = [name for name in {**old, **values} if old.get(name) != values.get(name)]
        for name in changed[:8]:
            what = name if group == "configuration" else f"{group.rstrip('s')} {name}"
            lines.append(f"{what}: {_shown(old.get(name))} -> {_shown(values.get(name))}")
        if len(changed) > 8:
            lines.append(f"and {len(changed) - 8} more {group}")
    return lines


def _shown(value: Any) -> str:
    text = "none" if value is None else json.dumps(value) if isinstance(value, list | bool) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, dict | ml_collections.ConfigDict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _extent(devices: Sequence[jax.Device]) -> str:
    """Returns the extent of the devices' coordinates within a slice, such as 4x4x1; "" if they have no coordinates."""
    coordinates = [device.coords for device in devices if hasattr(device, "coords")]
    return "x".join(str(max(axis) - min(axis) + 1) for axis in zip(*coordinates, strict=True))


def _machine() -> str:
    """Returns a digest of this machine's CPU features, because XLA compiles CPU code for these features."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:12]


def source_of_block(config: Config) -> dict[str, str]:
    """Returns a dict with one entry. Its key is a description for messages; its value is a digest of the source files
    of a custom model family and its blocks. The digest includes modules that these files import from the same folder or
    package. Returns {} for a built-in family."""
    if ":" not in config.decoder_block:
        return {}
    classes = map(block_class, blocks(stacks(config)))
    modules = {config.decoder_block.partition(":")[0], *(cls.__module__ for cls in classes)}
    return {"the source of decoder_block": " ".join(map(_source_of_module, sorted(modules)))}


def _source_of_module(module: str) -> str:
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return "not in a file"
    path = Path(file)
    root = path.parents[module.count(".") + (path.name == "__init__.py")]
    installed = str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return sources.digest(root, [module], lambda top: not installed or top == module.partition(".")[0])


def _source() -> str:
    """Returns a digest of the code that builds the step."""
    return sources.digest(Path(trainer.__file__).parents[1], [_BUILDER], lambda top: top == trainer.__name__)
