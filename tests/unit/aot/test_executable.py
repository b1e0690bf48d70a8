"""A compiled step in a file: what it was made of is compared before it runs."""

import copy
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support import assert_equal_bits, copied, packed_batch

from trainer.aot import executable
from trainer.config import UserError
from trainer.runtime.place import place


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
        state, metrics = compiled(state, place(batch, run.batch_shardings))
        return copied(jax.tree.leaves(state)), jax.device_get(metrics)

    result = after(load(step, file, origin), jax.tree.leaves(run.init()))
    assert_equal_bits(result, after(step.compiled, run.init()))
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
    assert message.startswith(f"compiled_trainstep_file={file} holds another step (there -> here):")
    assert "\n  scan_layers: true -> false\n  learning_rate: 0.006 -> 0.5\n  device number: 8 -> 4\n" in message
    assert f"\n  version jax: {jax.__version__} -> 0.0.1\ncompile again" in message
    assert "argument" not in message  # they follow from the rest


def test_a_slice_of_another_shape_is_another_topology(step, file, origin):
    def chips(*sizes):
        return [SimpleNamespace(coords=place) for place in itertools.product(*map(range, sizes))]

    assert executable._places(chips(4, 4, 1)) == "4x4x1"
    other = copy.deepcopy(origin)
    assert other["devices"]["places"] == ""
    other["devices"]["places"] = executable._places(chips(2, 8, 1))
    assert "device places:  -> 2x8x1" in refused(step, file, other)


def test_processes_of_cpu_devices_cannot_share_a_step(step, file, origin):
    devices = [SimpleNamespace(platform="cpu", process_index=index) for index in range(2)]
    with pytest.raises(UserError, match=f"compiled_trainstep_file={file}: a compiled step of CPU devices runs in one"):
        executable.load(file, origin, step.run.abstract_args(), devices)


def test_other_shapes_of_the_same_configuration_are_named(step, file, origin):
    other = copy.deepcopy(origin)
    name = next(name for name in other["arguments"] if "embedding" in name)
    other["arguments"][name] = "float32[1]"
    assert f"argument {name}: float32[64, 16]" in refused(step, file, other)


def test_a_damaged_file_and_another_one_are_refused(step, file, origin, tmp_path):
    content = file.read_bytes()
    for damaged, message in (
        (content[:-1] + bytes([content[-1] ^ 1]), "damaged, its step is not what was written"),
        (executable.MAGIC + b"{\n", "damaged, its head is no JSON"),
        (b"something else", "not a file that trainer.train_compile wrote"),
    ):
        path = tmp_path / "damaged"
        path.write_bytes(damaged)
        assert message in refused(step, path, origin)
    assert "cannot be read: No such file" in refused(step, tmp_path / "none", origin)


def test_the_code_of_the_step_counts_and_no_other(monkeypatch, tmp_path):
    for name in ("ops/rope.py", "training/build.py", "training/step.py", "training/loop.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1\n")
    monkeypatch.setattr(executable.trainer, "__file__", str(tmp_path / "__init__.py"))
    before = executable._source()
    (tmp_path / "training/loop.py").write_text("2\n")
    assert executable._source() == before
    (tmp_path / "ops/rope.py").write_text("2\n")
    assert executable._source() != before
