"""The state with which a run begins."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import arguments, assert_equal_bits, copied, first_tree, tiny_config

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.training.build import build
from trainer.training.start import start

ONLY_START = {"load_full_state_path", "load_parameters_path", "reset_optimizer", "steps"}  # only `start` reads these


@functools.cache
def run(**overrides):
    built = {key: value for key, value in overrides.items() if key not in ONLY_START}
    if built != overrides:
        return run(**built)._replace(config=tiny_config("nnx", **{"steps": 20} | overrides))
    return build(load(arguments("nnx", steps=20, **overrides)).config, jax.devices()[:1])


def native(this, seed, updates):
    """Returns a native state whose arrays all differ; schedule and step are at `updates`."""
    rng = np.random.default_rng(seed)

    def one(x):
        is_count = jnp.issubdtype(x.dtype, jnp.integer)
        return np.asarray(updates if is_count else rng.normal(size=x.shape)).astype(x.dtype)

    tree = jax.tree.map(one, this.codec.unpack(this.abstract_state))
    return jax.device_put(this.codec.pack(tree), this.states.shardings)


def dataset_of(this):
    return open_dataset(this.config, print)


def position_after(this, updates):
    """Returns the data position after the batch of the last of `updates`."""
    return {"identity": dataset_of(this).identity, "row": updates * this.rows}


def save(folder, this, updates, fingerprint=None, documents=None):
    """Writes a run's folder with one checkpoint, for `documents` instead of the run's data if given.

    Returns the native state.
    """
    state = native(this, updates, updates)
    position = position_after(this, updates)
    if documents:
        position["identity"] = position["identity"] | {"documents": documents}
    sidecar = Sidecar(to_yaml(this.config), position, fingerprint or dataset_of(this).fingerprint, {})
    with CheckpointManager(folder, this.config, print) as manager:
        manager.save(updates, this.codec.unpack(state), sidecar, {})
    return state


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Returns a run's folder, and the states of its two checkpoints."""
    folder = tmp_path_factory.mktemp("other")
    return folder, {updates: copied(save(folder, run(), updates)) for updates in (5, 10)}


@pytest.fixture
def given(tmp_path, other):
    """Returns a function that copies a checkpoint of `other` into the test's folder and returns its state."""

    def copy(updates):
        checkpoint = f"checkpoints/{updates}"
        shutil.copytree(other[0] / checkpoint, tmp_path / checkpoint)
        return other[1][updates]

    return copy


def begin(this, folder=None, lines=None, schedule_given=False):
    """Calls `start` in a run's folder, with or without checkpoints."""
    say = (lambda line: None) if lines is None else lines.append
    if folder is None:
        return start(this, dataset_of(this), None, say, schedule_given=schedule_given)
    with CheckpointManager(folder, this.config, say) as manager:
        return start(this, dataset_of(this), manager, say, schedule_given=schedule_given)


def assert_equal(this, left, right):
    assert_equal_bits(*(copied(this.codec.unpack(state)) for state in (left, right)))


def test_a_new_run_has_the_initial_state(tmp_path):
    for folder in (None, tmp_path):
        begun = begin(run(), folder)
        assert begun[1:4] == (0, None, False)
        assert_equal(run(), begun.state, run().init())


def test_its_own_newest_checkpoint(tmp_path, given):
    given(5)
    state = given(10)
    lines = []
    begun = begin(run(), tmp_path, lines)
    assert begun[1:4] == (10, position_after(run(), 10), True)
    assert_equal(run(), begun.state, state)
    assert lines == [f"{tmp_path}/checkpoints/10: 10 of 20 updates are done"]


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({}, ""),  # an earlier checkpoint has no versions
        ({"gone": "1"}, ""),
        ({"jax": "0.1"}, f"jax 0.1 -> {jax.__version__}"),
        ({"optax": optax.__version__, "jax": "0\x1b[2J"}, rf"jax 0\x1b[2J -> {jax.__version__}"),
    ],
)
def test_a_checkpoint_of_other_versions(tmp_path, monkeypatch, before, changes):
    with monkeypatch.context() as patch:
        patch.setattr(Sidecar.__new__, "__defaults__", (before, None, None))
        state = save(tmp_path, run(), 5)
    told = f"losses may differ in the last bits, because versions changed: {changes}"
    for this, folder in ((run(), tmp_path), (run(load_full_state_path=str(tmp_path)), None)):
        lines = []
        assert_equal(run(), begin(this, folder, lines).state, state)
        assert lines[:-1] == ([told] if changes else [])


def test_its_own_checkpoint_beats_the_sources_that_the_command_names(tmp_path):
    save(tmp_path / "other", run(), 15)
    this = run(load_full_state_path=str(tmp_path / "other"))
    assert begin(this, tmp_path / "mine").updates == 15
    state = save(tmp_path / "mine", this, 7)
    lines = []
    begun = begin(this, tmp_path / "mine", lines)
    assert begun[1:4] == (7, position_after(this, 7), True)
    assert lines[1:] == ["load_full_state_path is ignored: the run has its own checkpoint"]
    assert_equal(this, begun.state, state)


def test_a_schedule_that_follows_steps_is_a_warning(tmp_path, given):
    given(5)
    lines = []
    assert begin(run(steps=30), tmp_path, lines).updates == 5
    assert lines[0] == "warning: the learning rate schedule follows steps: learning_rate_schedule_steps: 20 -> 30"


def test_steps_below_the_checkpoint(tmp_path, given):
    given(10)
    with pytest.raises(UserError, match=r"steps=8: .*/10 holds 10 updates already; give steps=10 or more"):
        begin(run(steps=8), tmp_path)


def test_another_configuration_and_other_data(tmp_path, given):
    given(5)
    with pytest.raises(UserError, match=r'checkpoints/5 was saved with another .*\n  opt_type: "adamw" -> "sgd"'):
        begin(run(opt_type="sgd"), tmp_path)
    save(tmp_path, run(), 10, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=r"checkpoints/10 was trained on different data .* is 0123456789ab in "):
        begin(run(), tmp_path)
    save(tmp_path, run(), 15, documents="a book")
    with pytest.raises(UserError, match=r"checkpoints/15: .* belongs to other data: the training documents was a book"):
        begin(run(), tmp_path)


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/10", "checkpoints/5"])
def test_the_full_state_of_another_run(tmp_path, below, other):
    folder, states = other
    updates = 5 if below.endswith("/5") else 10
    lines = []
    this = run(load_full_state_path=str(folder / below))
    begun = begin(this, tmp_path / "mine", lines)
    assert begun[1:4] == (updates, position_after(this, updates), False)
    assert_equal(this, begun.state, states[updates])
    path = folder / f"checkpoints/{updates}"
    assert lines == [f"starting from {path}: {updates} updates, its optimizer, its position in the data"]
    assert begin(this).updates == updates, "without checkpoints of its own too"


def test_the_full_state_of_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(UserError, match=f"load_full_state_path={tmp_path}/{name}: no checkpoint there; give a run"):
            begin(run(load_full_state_path=str(tmp_path / name)))


def test_a_damaged_full_state(tmp_path, given):
    given(5)
    (tmp_path / "checkpoints/5/run/data.json").write_text("{}")
    with pytest.raises(UserError, match=r"checkpoints/5 is damaged: run/data\.json has 2 bytes instead of"):
        begin(run(load_full_state_path=str(tmp_path)))


def test_a_full_state_that_has_all_updates(tmp_path, given):
    given(10)
    with pytest.raises(UserError, match=r"steps=10: load_full_state_path=.*/10 holds 10 updates already"):
        begin(run(load_full_state_path=str(tmp_path), steps=10))


def test_other_data_begin_at_their_start(tmp_path):
    save(tmp_path, run(), 5, fingerprint="of other data")
    lines = []
    begun = begin(run(load_full_state_path=str(tmp_path)), lines=lines)
    assert begun[1:4] == (5, None, False)
    assert lines[0].endswith("5 updates, its optimizer, the beginning of other data")


@pytest.mark.parametrize(("own", "opt_type"), [(False, "adamw"), (False, "sgd"), (True, "lion")])
def test_a_fresh_optimizer_keeps_step_parameters_and_the_schedules_place(tmp_path, given, own, opt_type):
    state = run().codec.unpack(given(5))
    path = {} if own else {"load_full_state_path": str(tmp_path)}
    this = run(reset_optimizer=True, opt_type=opt_type, **path)
    lines = []
    begun = begin(this, tmp_path if own else None, lines=lines)
    tree, fresh = this.codec.unpack(begun.state), first_tree(this)
    assert begun[1:4] == (5, position_after(this, 5), own)
    assert tree.step == 5
    assert_equal_bits(copied(tree.params), copied(state.params))
    assert "a fresh optimizer" in lines[0]

    def schedules(opt_state):
        is_schedule = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
        return [n for n in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(n)]

    (schedule,) = schedules(tree.opt_state)
    assert np.asarray(schedule.count) == 5
    zeroed = jax.tree.map(
        lambda n: n._replace(count=np.zeros_like(n.count)) if isinstance(n, optax.ScaleByScheduleState) else n,
        tree.opt_state,
        is_leaf=lambda n: isinstance(n, optax.ScaleByScheduleState),
    )
    assert_equal_bits(copied(zeroed), fresh.opt_state)
    shards = [shard.data for leaf in jax.tree.leaves(begun.state) for shard in leaf.addressable_shards]
    places = [shard.unsafe_buffer_pointer() for shard in shards]
    assert len(set(places)) == len(places), "no buffer is donated twice"
    # jit treats it like any other state.
    this.step.trace(begun.state, *this.abstract_args()[1:])


def test_without_a_fresh_optimizer_another_one_is_refused(tmp_path, given):
    given(5)
    path = str(tmp_path)
    with pytest.raises(UserError, match=r"/5 holds the optimizer state of adamw, and this command has opt_type=nadamw"):
        begin(run(load_full_state_path=path, opt_type="nadamw"))
    with pytest.raises(UserError, match=r"has another optimizer: opt_state/.* fresh optimizer: reset_optimizer=true"):
        begin(run(load_full_state_path=path, mu_dtype="bfloat16"))


def test_the_same_command_resumes_what_it_reset(tmp_path):
    this = run(reset_optimizer=True)
    lines = []
    begin(this, tmp_path, lines)
    assert lines == ["reset_optimizer has no effect: no state is loaded, so the optimizer is fresh"]
    state = save(tmp_path, this, 5)
    assert_equal(this, begin(this, tmp_path, lines).state, state)
    assert lines[1:] == [
        f"{tmp_path}/checkpoints/5: 5 of 20 updates are done",
        "reset_optimizer=true was already applied in this run: the optimizer state of the checkpoint is resumed",
    ]


def test_another_model_is_refused(tmp_path, given):
    given(5)
    with pytest.raises(UserError, match=r"has another model: params/.* float32\[.*\] there and float32\[.*\] in this"):
        begin(run(load_full_state_path=str(tmp_path), base_mlp_dim=48))


def test_the_other_run_may_go_away_afterwards(tmp_path, given):
    state = given(5)
    this = run(load_full_state_path=str(tmp_path))
    begun = begin(this)
    shutil.rmtree(tmp_path)
    assert_equal(this, begun.state, state)


@pytest.mark.parametrize("key", ["load_full_state_path", "load_parameters_path"])
def test_what_is_loaded_must_be_finite(tmp_path, key):
    this = run()
    tree = this.codec.unpack(native(this, 1, 8))
    table = copied(tree.params["token_embedder"]["embedding"])
    table[2, 3] = np.nan
    tree.params["token_embedder"]["embedding"] = jax.device_put(table, jax.devices()[0])
    sidecar = Sidecar(to_yaml(this.config), position_after(this, 8), dataset_of(this).fingerprint, {})
    with CheckpointManager(tmp_path / "other", this.config, print) as manager:
        manager.save(8, tree, sidecar, {})
    with pytest.raises(UserError) as error:
        begin(run(**{key: tmp_path / "other"}))
    place = "params/token_embedder/embedding"
    assert str(error.value) == (
        f"{key}={tmp_path}/other: there is a NaN or an infinity in {place}; load a checkpoint without one"
    )
