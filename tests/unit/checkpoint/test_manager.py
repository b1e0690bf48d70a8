"""Train states on disk: every optimizer's, in every combination; damage, disk errors, retention."""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest
from optimizers import OPTIMIZERS
from orbax import checkpoint as ocp
from support import ALL_COMBINATIONS, assert_equal_bits, copied, tiny_config

from trainer.backends import StateCodec, TrainTree, make_model
from trainer.checkpoint import Beside, CheckpointManager, inspect, newest, restore
from trainer.checkpoint.beside import BesideFiles, read_beside
from trainer.checkpoint.disk import forget_failures
from trainer.config import UserError

BESIDE = Beside("base_config: base.yml\n", {"row": 3}, "corpus 1", {"tokenizer.json": b"{}"})
SETTINGS = {
    "async_checkpointing": True,
    "max_num_checkpoints_to_keep": None,
    "checkpoint_keep_period": 0,
    "keep_best_checkpoints": 0,
}


def settings(**changes):
    return ml_collections.ConfigDict(SETTINGS | changes)


def small_tree(value=0.0, width=4):
    params = {"layer": {"kernel": jnp.full((width, width), value)}}
    return TrainTree(jnp.asarray(3, jnp.int32), params, optax.adam(0.1).init(params), {})


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(folder, updates=3, tree=None, **changes):
    """The folder of a checkpoint in a new run's folder."""
    with CheckpointManager(folder, settings(**changes), say=print) as manager:
        manager.save(updates, small_tree() if tree is None else tree, BESIDE, {})
        return manager.path(updates)


def random_like(tree, seed):
    """Every array with random contents, so that no two could stand for each other."""
    rng = np.random.default_rng(seed)

    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(rng.integers(1 << 30))
        if x.dtype == bool:
            return jnp.asarray(rng.integers(0, 2, x.shape), bool)
        return jnp.asarray(rng.normal(0, 1e3, x.shape)).astype(x.dtype)

    return jax.tree.map(one, tree)


@pytest.mark.parametrize("index", range(len(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_every_optimizers_state_comes_back(index, tmp_path):
    """Each of them in one combination, and restored into the next one's native state."""
    one, other = (ALL_COMBINATIONS[(index + i) % len(ALL_COMBINATIONS)] for i in range(2))
    tx = list(OPTIMIZERS.values())[index]
    codec, into = (StateCodec(make_model(tiny_config(c, weight_dtype="bfloat16")), tx) for c in (one, other))
    tree = random_like(codec.unpack(codec.init(jax.random.key(0))), seed=index)
    path = saved(tmp_path, 7, tree)
    wanted = into.unpack(jax.eval_shape(into.init, jax.random.key(0)))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), wanted)
    found = into.unpack(into.pack(restore(path, wanted)))
    raw = [jax.tree.map(_bits, copied_tree) for copied_tree in (tree, found)]
    assert_equal_bits(*raw)
    assert inspect(path) == BESIDE


def _bits(x):
    return np.array(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, copy=True)


def test_a_state_on_eight_devices_comes_back_on_another_mesh(tmp_path):
    devices = np.asarray(jax.devices())
    spec = jax.sharding.PartitionSpec("a", "b")
    meshes = [jax.sharding.Mesh(devices.reshape(shape), ("a", "b")) for shape in ((4, 2), (2, 4), (1, 8))]
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    first, *others = [jax.sharding.NamedSharding(mesh, spec) for mesh in meshes]
    path = saved(tmp_path, tree=TrainTree(jnp.zeros((), jnp.int32), {"k": jax.device_put(value, first)}, (), {}))
    for sharding in others:
        wanted = {"k": jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)}
        tree = restore(path, TrainTree(None, wanted, (), {}))
        assert tree.params["k"].sharding == sharding
        np.testing.assert_array_equal(tree.params["k"], value)


def test_a_part_that_is_not_wanted_is_not_read(tmp_path):
    path = saved(tmp_path)
    tree = restore(path, abstract(small_tree())._replace(opt_state=None))
    assert tree.opt_state is None
    assert_equal_bits(copied(tree.params), copied(small_tree().params))


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
    tree = small_tree(1.0, width=512)
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        manager.save(1, tree, BESIDE, {})
        overwritten = jax.jit(lambda x: x * 0, donate_argnums=0)(tree.params["layer"]["kernel"])
        jax.block_until_ready(overwritten)
    assert np.all(
        restore(tmp_path / "checkpoints/1", abstract(small_tree(1.0, width=512))).params["layer"]["kernel"] == 1
    )


def files(path):
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())


def test_any_damaged_file_is_named(tmp_path):
    path = saved(tmp_path)
    names = [name for name in files(path) if not name.startswith("commit") and name != "sums.json"]
    assert len(names) > 8
    for name in names:
        content = (path / name).read_bytes()
        if not content:
            continue
        changed = content[:-1] + bytes([content[-1] ^ 1]) if name != "_CHECKPOINT_METADATA" else b"no JSON"
        for damage in (content[:-1], changed, None):
            (path / name).unlink() if damage is None else (path / name).write_bytes(damage)
            told = rf"^checkpoint {path} is damaged: {name} (has|is not|cannot).*; to go on"
            with pytest.raises(UserError, match=told):
                inspect(path)
        (path / name).write_bytes(content)
    assert inspect(path) == BESIDE


def test_damage_is_found_wherever_it_is_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.checkpoint.sums._CHUNK", 16)
    path = saved(tmp_path)
    name = max(files(path), key=lambda name: (path / name).stat().st_size)
    content = (path / name).read_bytes()
    assert len(content) > 4 * 16
    for i in (0, 16, len(content) // 2, len(content) - 1):
        (path / name).write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        with pytest.raises(UserError, match=f"is damaged: {name} is not what was written"):
            inspect(path)


@pytest.mark.parametrize("content", [None, "", "[]", '{"a": 1}'])
def test_sums_that_cannot_be_read_are_damage(tmp_path, content):
    path = saved(tmp_path)
    (path / "sums.json").unlink() if content is None else (path / "sums.json").write_text(content)
    with pytest.raises(UserError, match=r"is damaged: sums\.json cannot be read"):
        inspect(path)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            small_tree(width=5),
            "of another model: params/layer/kernel is float32[4, 4] there and float32[5, 5] in",
        ),
        (
            small_tree()._replace(opt_state=optax.sgd(0.1, momentum=0.9).init(small_tree().params)),
            "of another optimizer: opt_state/0/trace/layer/kernel is absent there and float32[4, 4] in this run",
        ),
        (
            small_tree()._replace(params={"other": jnp.zeros(2)}),
            "params/other is absent there and float32[2] in",
        ),
        (small_tree()._replace(step=jnp.zeros((), jnp.uint32)), "step is int32[] there and uint32[] in this run"),
    ],
)
def test_another_model_or_optimizer_names_the_first_leaf(tmp_path, wanted, message):
    with pytest.raises(UserError) as error:
        restore(saved(tmp_path), abstract(wanted))
    assert message in str(error.value)


def test_a_save_that_never_committed_is_cleared_away(tmp_path):
    path = saved(tmp_path)
    leftover = path.with_name("9.orbax-checkpoint-tmp")
    (leftover / "state").mkdir(parents=True)
    lines = []
    with CheckpointManager(tmp_path, settings(), say=lines.append) as manager:
        assert manager.latest == 3
    assert lines == [f"{leftover} was never committed: removed"]
    assert not leftover.exists()
    assert newest(tmp_path) == path == newest(path) == newest(path.parent)
    assert newest(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"max_num_checkpoints_to_keep": 2}, [5, 6]),
        ({"max_num_checkpoints_to_keep": 1, "checkpoint_keep_period": 3}, [3, 6]),
        ({"max_num_checkpoints_to_keep": 1, "keep_best_checkpoints": 2}, [2, 4, 6]),
    ],
)
def test_retention(tmp_path, changes, kept):
    losses = {2: 1.0, 4: 2.0, 5: 3.0}
    with CheckpointManager(tmp_path, settings(**changes), say=print) as manager:
        for updates in range(1, 7):
            metrics = {"eval_loss": losses[updates]} if updates in losses else {}
            manager.save(updates, small_tree(), BESIDE, metrics)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == kept


def test_a_process_killed_while_it_deletes_leaves_nothing_that_looks_damaged(tmp_path, monkeypatch):
    """The rename is the first thing that happens to a checkpoint that expired."""

    class Killed(BaseException):
        pass

    def rmtree(path):
        (path / "sums.json").unlink()
        raise Killed

    manager = CheckpointManager(tmp_path, settings(max_num_checkpoints_to_keep=1), say=print)
    manager.save(1, small_tree(), BESIDE, {})
    manager.wait()
    monkeypatch.setattr("shutil.rmtree", rmtree)
    manager.save(2, small_tree(), BESIDE, {})
    with pytest.raises(Killed):
        manager.close()
    monkeypatch.undo()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1.expired", "2"}
    assert newest(tmp_path) == tmp_path / "checkpoints/2"
    lines = []
    with CheckpointManager(tmp_path, settings(max_num_checkpoints_to_keep=1), say=lines.append) as manager:
        assert manager.latest == 2
    assert lines == []
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2"}


def test_retention_goes_on_in_another_process(tmp_path):
    keeping = settings(max_num_checkpoints_to_keep=1, keep_best_checkpoints=1)
    for updates, loss in ((1, 2.0), (2, 1.0), (3, 3.0), (4, None)):
        with CheckpointManager(tmp_path, keeping, say=print) as manager:
            manager.save(updates, small_tree(), BESIDE, {} if loss is None else {"eval_loss": loss})
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4"}
    (tmp_path / "checkpoints/2/run/metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"checkpoints/2 is damaged: run/metrics\.json cannot be read"):
        CheckpointManager(tmp_path, keeping, say=print)


@pytest.mark.parametrize("gone", ["_CHECKPOINT_METADATA", "sums.json", "state/_METADATA", "run/data.json"])
def test_a_damaged_newest_checkpoint_is_still_the_newest(tmp_path, gone):
    """Going back to an older one is the user's decision."""
    for updates in (1, 2):
        path = saved(tmp_path, updates)
    (path / gone).unlink()
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest == 2
        with pytest.raises(UserError, match=f"is damaged: {gone} .*; to go on from the checkpoint before it, remove"):
            inspect(manager.path(2))


def test_other_things_may_lie_beside_checkpoints(tmp_path):
    path = saved(tmp_path)
    (path.parent / "notes.txt").write_text("mine")
    (path.parent / "17").write_text("a file")
    (path.parent / "backup").mkdir()
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest == 3
    assert newest(tmp_path) == path


def test_latest_knows_of_a_save_that_is_under_way(tmp_path):
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        assert manager.latest is None
        manager.save(5, small_tree(width=512), BESIDE, {})
        assert manager.latest == 5
        manager.wait()
        assert newest(tmp_path) == manager.path(5)
        manager.wait()


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path):
    with CheckpointManager(tmp_path, settings(async_checkpointing=False), say=print) as manager:
        manager.save(5, small_tree(), BESIDE, {})
        assert inspect(manager.path(5)) == BESIDE


def in_process_of_its_own(program, **names):
    """What a process prints that runs `program`, to which this file is `module`."""
    head = """
        import importlib.util, sys
        from pathlib import Path
        sys.path.insert(0, "TESTS")
        spec = importlib.util.spec_from_file_location("test_manager", "HERE")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    """
    program = textwrap.dedent(head) + textwrap.dedent(program)
    here = Path(__file__)
    for name, value in ({"TESTS": here.parents[2], "HERE": here} | names).items():
        program = program.replace(name, str(value))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ, timeout=120
    )


def test_a_full_disk_is_one_message_and_the_last_checkpoint_stays(tmp_path):
    """A process that may write no file beyond 1 MB stands for a full disk."""
    program = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        module.saved(Path("RUN"), 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            module.saved(Path("RUN"), 2, module.small_tree(width=2048))
        except module.UserError as error:
            print("error:", error)
    """
    done = in_process_of_its_own(program, RUN=tmp_path)
    assert f"error: cannot write a checkpoint below {tmp_path}/checkpoints: File too large; the" in done.stdout
    assert "are intact: free disk space and give the same command again" in done.stdout
    assert done.stderr == ""
    assert newest(tmp_path) == tmp_path / "checkpoints/1"
    assert inspect(tmp_path / "checkpoints/1") == BESIDE


def test_a_process_ends_after_a_save_for_which_no_folder_could_be_made(tmp_path):
    """A thread of Orbax that waited for the folder would keep the process."""
    program = """
        for background in (True, False):
            run = Path("RUN") / str(background)
            try:
                settings = module.settings(async_checkpointing=background)
                with module.CheckpointManager(run, settings, say=print) as manager:
                    manager.save(1, module.small_tree(), module.BESIDE, {})
                    manager.wait()
                    manager.directory.rename(run / "moved")
                    manager.directory.touch()
                    manager.save(2, module.small_tree(), module.BESIDE, {})
            except module.UserError as error:
                print("error:", error)
    """
    done = in_process_of_its_own(program, RUN=tmp_path)
    for background in (True, False):
        assert (
            f"error: cannot write a checkpoint below {tmp_path}/{background}/checkpoints: Not a directory"
            in done.stdout
        )
        assert inspect(tmp_path / f"{background}/moved/1") == BESIDE
    assert done.stderr == ""


def test_what_fails_after_a_part_of_a_save_failed_prints_nothing(tmp_path, monkeypatch, capfd):
    """Orbax closes the event loop to which TensorStore's threads would report."""

    async def write(self, directory):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BesideFiles, "_write", write)
    with pytest.raises(UserError, match=r"checkpoints: No space left on device; .* free disk space and give the same"):
        saved(tmp_path, tree=small_tree(width=1024))
    sys.unraisablehook(types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed")))
    assert capfd.readouterr() == ("", "")
    assert newest(tmp_path) is None


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")])
def test_checkpoints_is_no_folder(tmp_path, make):
    make(tmp_path / "checkpoints")
    with pytest.raises(UserError, match=f"{tmp_path}/checkpoints is no folder, and checkpoints are to be saved below"):
        CheckpointManager(tmp_path, settings(), say=print)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            errno.ENOSPC,
            "No space left on device; free disk space and give the same command again, or set enable_checkpoi",
        ),
        (errno.EROFS, "Read-only file system; make the folder writable and give the same command again, or set"),
        (errno.EIO, "Input/output error; check the disk or its connection and give the same command again, or"),
    ],
)
def test_a_folder_that_takes_no_file_is_told_before_training(tmp_path, monkeypatch, code, message):
    def refused(path, content):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "write_bytes", refused)
    with pytest.raises(UserError, match=f"cannot write checkpoints below {tmp_path}/checkpoints: {message}"):
        CheckpointManager(tmp_path, settings(), say=print)
    monkeypatch.undo()
    lines = []
    with CheckpointManager(tmp_path, settings(), say=lines.append):
        assert lines == []
        assert list((tmp_path / "checkpoints").iterdir()) == [], "neither trial is left"


def test_what_a_killed_trial_left_is_cleared_away(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/trial-0.expired").touch()
    with CheckpointManager(tmp_path, settings(), say=print):
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_of_several_processes_the_one_whose_disk_fails_does_not_wait_for_the_others(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        manager._ending = Future()  # never ends: the other process waits for this one
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        logging.getLogger("absl").error("as a thread of Orbax does", exc_info=error)
        with pytest.raises(UserError, match=r"cannot write a checkpoint below .*: No space left on device"):
            manager.wait()


def test_of_several_processes_the_one_whose_save_fails_raises_what_failed(tmp_path, monkeypatch):
    """An error of a bucket, which is none of the disk; the logger is also that of others, who may log theirs."""
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        manager._ending = Future()
        forget_failures()
        logger = logging.getLogger("absl")
        for file, error in (("/site/grain/a.py", ValueError("other")), (ocp.__file__, ValueError("no credentials"))):
            logger.handle(logger.makeRecord("absl", logging.ERROR, file, 1, "", (), (ValueError, error, None)))
        with pytest.raises(ValueError, match="no credentials"):
            manager.wait()


def test_what_failed_in_a_save_is_raised_before_the_barrier_that_others_missed(tmp_path, monkeypatch):
    def missed(folder):
        raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")

    saving = Future()
    saving.set_exception(ValueError("no credentials"))
    with CheckpointManager(tmp_path, settings(), say=print) as manager, monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint.manager.is_first", lambda: False)
        patch.setattr("trainer.checkpoint.manager._sum", missed)
        with pytest.raises(ValueError, match="no credentials"):
            manager._end(saving, 3)


def test_only_the_folder_that_is_saved_is_summed(tmp_path):
    """Other processes would not come to the barriers of another."""
    with CheckpointManager(tmp_path, settings(), say=print) as manager:
        stray = manager.directory / "9.orbax-checkpoint-tmp"
        stray.mkdir()
        manager.save(3, small_tree(), BESIDE, {})
    assert inspect(manager.path(3)) == BESIDE
    assert list(stray.iterdir()) == []


class Endless(Future):
    """A save whose end is waited for until Ctrl-C comes a second time."""

    def result(self):
        raise KeyboardInterrupt


def test_ctrl_c_waits_for_the_save_that_runs_and_a_second_one_does_not(tmp_path):
    lines = []

    def interrupted():
        with CheckpointManager(tmp_path, settings(), say=lines.append) as manager:
            manager.save(1, small_tree(), BESIDE, {})
            manager.wait()
            manager._ending = Endless()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines == [
        "interrupted: waiting for the checkpoint of 1 updates, which is being written; Ctrl-C again ends without it"
    ]


def test_a_folder_that_cannot_be_read_is_not_told_as_one_that_cannot_be_written(tmp_path, monkeypatch):
    saved(tmp_path)

    def refused(path):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("trainer.checkpoint.manager.entries", refused)
    with pytest.raises(
        UserError, match=f"^cannot read the checkpoints below {tmp_path}/checkpoints: Permission denied"
    ):
        CheckpointManager(tmp_path, settings(), say=print)


def test_sums_cover_every_file_but_the_mark_of_the_commit(tmp_path):
    path = saved(tmp_path)
    summed = json.loads((path / "sums.json").read_text())
    assert set(files(path)) - set(summed) <= {"sums.json", "commit_success.txt", "_CHECKPOINT_METADATA"}


def test_each_process_has_a_position_of_its_own(tmp_path, monkeypatch):
    for process in (0, 1):
        monkeypatch.setattr("trainer.checkpoint.beside._process_index", lambda process=process: process)
        write = BesideFiles(BESIDE._replace(position={"row": process}))._write(Created(tmp_path))
        asyncio.run(write)
    for process, row in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setattr("trainer.checkpoint.beside._process_index", lambda process=process: process)
        assert read_beside(tmp_path) == BESIDE._replace(position={"row": row})


class Created:
    """A folder as Orbax hands it to what is saved in it."""

    def __init__(self, path):
        self.path = path

    async def await_creation(self):
        return self.path
