"""A compiled step in a file: everything that it depends on is compared before it runs."""

import ast
import copy
import hashlib
import io
import itertools
import json
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sources import SOURCE
from support import (
    ALL_COMBINATIONS,
    LAST_CASE,
    assert_equal_bits,
    copied,
    first_tree,
    packed_batch,
    state_from,
    tiny_config,
)

from trainer.aot import executable, sources
from trainer.config.capabilities.all_keys import step_keys
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.training.batches import placed
from trainer.training.build import build

# These files build the configuration, whose values are part of the key.
READS_BASE_YML = ("schema.py", "values.py")


@pytest.fixture(scope="module")
def origin(step):
    return executable.origin_of(step.run.config, list(step.run.mesh.devices.flat), step.run.abstract_args())


@pytest.fixture(scope="module")
def file(step, origin, tmp_path_factory):
    path = tmp_path_factory.mktemp("executable") / "below" / "step"
    executable.save(path, step.compiled, origin)
    return path


def load(step, path, origin):
    return executable.load(path, origin, step.run.abstract_args(), list(step.run.mesh.devices.flat))


def test_the_loaded_step_does_what_the_saved_one_does(step, file, origin):
    run = step.run
    batch = packed_batch(run.config, run.rows)

    def after(compiled, state):
        state, metrics = compiled(state, placed(run, batch), ())
        return copied(jax.tree.leaves(state)), jax.device_get(metrics)

    tree = first_tree(run)
    result = after(load(step, file, origin), jax.tree.leaves(state_from(run, tree)))
    assert_equal_bits(result, after(step.compiled, state_from(run, tree)))
    assert np.isfinite(result[1]["loss"])
    assert [path.name for path in file.parent.iterdir()] == ["step"]


def refused(step, path, origin):
    with pytest.raises(UserError) as error:
        load(step, path, origin)
    return str(error.value)


def test_what_differs_is_named(step, file, origin):
    other = copy.deepcopy(origin)
    other["configuration"] |= {"scan_layers": False, "learning_rate": 0.5}
    other["devices"]["number"] = 4
    other["versions"]["jax"] = "0.0.1"
    other["arguments"] = {"a": "int32[1]"}
    message = refused(step, file, other)
    assert message.startswith(f"compiled_trainstep_file={file} contains a different step (file -> run):")
    assert "\n  scan_layers: true -> false\n  learning_rate: 0.006 -> 0.5\n  device number: 8 -> 4\n" in message
    assert f"\n  version jax: {jax.__version__} -> 0.0.1\ncompile again" in message
    assert "argument" not in message  # argument differences follow from the others


def test_a_slice_of_another_shape_is_another_topology(step, file, origin):
    def chips(*sizes):
        return [SimpleNamespace(coords=place) for place in itertools.product(*map(range, sizes))]

    assert executable._extent(chips(4, 4, 1)) == "4x4x1"
    other = copy.deepcopy(origin)
    assert other["devices"]["extent"] == ""
    other["devices"]["extent"] = executable._extent(chips(2, 8, 1))
    assert "device extent:  -> 2x8x1" in refused(step, file, other)


def test_processes_of_cpu_devices_cannot_share_a_step(step, file, origin):
    devices = [SimpleNamespace(platform="cpu", process_index=index) for index in range(2)]
    with pytest.raises(
        UserError, match=f"compiled_trainstep_file={file}: a compiled step for CPU devices can run in only one"
    ):
        executable.load(file, origin, step.run.abstract_args(), devices)


def test_other_shapes_of_the_same_configuration_are_named(step, file, origin):
    other = copy.deepcopy(origin)
    name = next(name for name in other["arguments"] if "embedding" in name)
    other["arguments"][name] = "float32[1]"
    assert f"argument {name}: float32[64, 16]" in refused(step, file, other)


@pytest.mark.parametrize("part", [0, 1], ids=["state", "batch"])
def test_another_sharding_of_an_argument_is_named(step, file, part):
    """Only the sharding differs: shape, dtype and mesh are those in the file."""
    args = step.run.abstract_args()
    leaves, structure = jax.tree.flatten(args)
    changed = len(leaves) - 1 if part else next(i for i, leaf in enumerate(leaves) if any(leaf.sharding.spec))
    before, whole = leaves[changed], jax.sharding.NamedSharding(step.run.mesh, jax.sharding.PartitionSpec())
    leaves[changed] = jax.ShapeDtypeStruct(before.shape, before.dtype, sharding=whole)
    other = executable.origin_of(step.run.config, list(step.run.mesh.devices.flat), structure.unflatten(leaves))
    name = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(args)[changed][0])
    shape = f"{before.dtype}{list(before.shape)}"
    message = refused(step, file, other)
    assert f"file -> run):\n  argument {name}: {shape} P(" in message
    assert f" -> {shape} {whole.spec}\ncompile again" in message


def test_a_damaged_file_and_another_one_are_refused(step, file, origin, tmp_path):
    content = file.read_bytes()
    for damaged, message in (
        (content[:-1] + bytes([content[-1] ^ 1]), "damaged, its checksum does not match"),
        (executable.MAGIC + b"{\n", "damaged, its header is not JSON"),
        (b"something else", "not a file that trainer.train_compile wrote"),
    ):
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        assert message in refused(step, path, origin)
    assert "cannot be read: No such file" in refused(step, tmp_path / "none", origin)


class _Exec:
    """Pickles like an executable that this XLA cannot read."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return ("exec", b"of another XLA") if isinstance(obj, _Exec) else None


def test_a_whole_file_that_this_jax_cannot_load_is_refused(step, file, origin, tmp_path):
    """The header names the same versions and the checksum matches."""
    of_another_xla = io.BytesIO()
    _Pickler(of_another_xla).dump((_Exec(), [], True))
    head, _, _ = file.read_bytes().removeprefix(executable.MAGIC).partition(b"\n")
    for payload in (of_another_xla.getvalue(), b"no pickle"):
        changed = json.loads(head) | {"sha256": hashlib.sha256(payload).hexdigest()}
        (tmp_path / "step").write_bytes(executable.MAGIC + json.dumps(changed).encode() + b"\n" + payload)
        message = refused(step, tmp_path / "step", origin)
        assert message.startswith(f"compiled_trainstep_file={tmp_path}/step: this JAX cannot load it: ")
        assert message.endswith("; compile again, or leave the key out")


def test_another_setting_of_jax_is_named(step, file, origin):
    with jax.default_matmul_precision("float32"):
        other = executable.origin_of(step.run.config, list(step.run.mesh.devices.flat), step.run.abstract_args())
    assert "\n  setting jax_default_matmul_precision: None -> float32\n" in refused(step, file, other)


def test_the_key_is_of_the_checkout_that_runs(monkeypatch, tmp_path):
    """A changed file matters only if the step depends on it."""
    copied = tmp_path / "trainer"
    shutil.copytree(SOURCE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(executable.trainer, "__file__", str(copied / "__init__.py"))
    before = executable._source()

    def after_a_change_of(name):
        text = (copied / name).read_text()
        (copied / name).write_text(f"{text}# changed\n")
        changed = executable._source()
        (copied / name).write_text(text)
        return changed

    # The registry refers to linen/stack.py by a string. The file disappears with Linen.
    for name in ("training/step.py", *(["linen/stack.py"] if (copied / "linen").exists() else [])):
        assert after_a_change_of(name) != before, name
    for name in ("training/loop.py", "data/packing.py"):
        assert after_a_change_of(name) == before, name


@pytest.mark.rest(covered_by="nnx; a change of the Linen package changes the key", cases=LAST_CASE)
# The first and the last combination: one of each module system.
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_whatever_runs_while_a_step_is_traced_is_in_the_key(combination):
    """Compares the imports, from which the key is derived, with the files that tracing really runs."""
    config = tiny_config(combination, dropout_rate=0.1, gradient_accumulation_steps=2, record_internal_nn_metrics=1)
    ran = set()

    def profile(frame, event, _):
        if event == "call":
            ran.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        run = build(config, jax.devices()[:1])
        run.step.lower(*run.abstract_args())
    finally:
        sys.setprofile(None)
    ran = {Path(name) for name in ran if Path(name).is_relative_to(SOURCE)}
    known = sources.source_files(SOURCE.parent, [executable._BUILDER], lambda top: top == "trainer")
    assert SOURCE / "training" / "step.py" in ran
    assert ran - set(known) <= {SOURCE / "config" / name for name in READS_BASE_YML}


# These settings determine how many documents share a row. The step's key contains that number, for kernels that read
# it. The code reads the settings themselves only in checks.
OF_DOCUMENTS = (
    *("dataset_type", "data_pipeline", "grain_file_type", "packing", "max_segments_per_seq", "reset_attention_mask"),
    *("packing_max_segments_per_sample", "mmap_eod_id", "mmap_npy_split", "eod_mask_loss", "held_out_share"),
    *("tokenizer_path", "tokenizer_type"),
)
# Keys that the code of the step reads although they do not affect it. Values derived from them have their own keys.
READ_BESIDES = {
    "eval_interval",
    "eval_per_device_batch_size",
    "hardware",
    *("load_parameters_path", "load_full_state_path"),  # in checks of the masks that a checkpoint has
    *("teacher_path", "teacher_logits_path"),  # as the name of a key, and for whether logits are saved
    "rl_num_generations",  # affects the engine, not the step
    "lora_restore_path",  # in a check of keys without effect
    "model_name",  # as the name of a MaxText key, in a family's facts about MaxText
    "mtp_eval_target_module",
    "override_model_config",  # like model_name
    *("prefill_chunk_size", "quantize_kvcache"),  # in checks of batch_invariant
    "sharding_tolerance",
    "steps",
    *("num_batches", "rl_num_iterations"),  # `steps` is derived from them
    *("decode_sampling_temperature", "sft_train_on_completion_only"),  # in the key with use_grpo, and with use_dpo
    *OF_DOCUMENTS,
}


def test_every_key_that_the_code_of_the_step_reads_is_in_the_key():
    """Finds keys in the source: `config.NAME`, and NAME as a string."""
    known, read = set(schema().keys), set()
    for file in sources.source_files(SOURCE.parent, [executable._BUILDER], lambda top: top == "trainer"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                read |= {node.attr} & known if name in ("config", "c", "values") else set()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= {node.value} & known
    assert len(read) > 80
    assert read - set(step_keys()) == READ_BESIDES


def test_the_last_step_is_in_the_key_of_islands():
    """All fragments synchronize after the last step."""
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2, "learning_rate_schedule_steps": 9}
    for given, differ in ((islands, True), ({"learning_rate_schedule_steps": 9}, False)):
        configs = (tiny_config(ALL_COMBINATIONS[0], devices=2, steps=steps, **given) for steps in (5, 6))
        found = [executable.origin_of(config, jax.devices()[:2], ())["configuration"] for config in configs]
        assert (found[0] != found[1]) == differ


@pytest.mark.parametrize(("attention", "differ"), [("cudnn_flash_jax", True), ("dot_product", False)])
def test_the_documents_of_a_row_are_in_the_key_of_a_kernel_that_reads_them(attention, differ):
    config = tiny_config(ALL_COMBINATIONS[0])
    both = [Config({**config, "attention": attention, "packing": packing}) for packing in (True, False)]
    found = [executable.origin_of(config, jax.devices()[:1], ())["configuration"] for config in both]
    assert (found[0] != found[1]) == differ


@pytest.mark.parametrize("installed", [False, True])
def test_what_a_users_block_imports_from_beside_it_counts(monkeypatch, tmp_path, installed):
    monkeypatch.syspath_prepend(str(tmp_path))
    if installed:
        monkeypatch.setattr(executable.sysconfig, "get_path", lambda name: str(tmp_path))
    files = {
        "beside.py": "SIZE = 1\n",
        "theirs/__init__.py": "",
        "theirs/parts.py": "WIDTH = 1\n",
        "theirs/block.py": """
from flax import nnx
import beside
from .parts import WIDTH

class Block(nnx.Module):
    def __init__(self, config, rngs):
        pass

    def __call__(self, x, cache, context):
        return x, cache
""",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config = tiny_config(ALL_COMBINATIONS[0], decoder_block="theirs.block:Block")
    before = executable.source_of_block(config)

    def after_a_change_of(name):
        (tmp_path / name).write_text(f"{files[name]}# changed\n")
        changed = executable.source_of_block(config)
        (tmp_path / name).write_text(files[name])
        return changed

    for name in ("theirs/block.py", "theirs/parts.py"):
        assert after_a_change_of(name) != before, name
    assert (after_a_change_of("beside.py") == before) == installed
    for name in ("theirs.block", "theirs.parts", "theirs", "beside"):
        sys.modules.pop(name, None)
