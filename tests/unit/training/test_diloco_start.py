"""The states from which DiLoCo and plain runs begin."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, tiny_config

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.save import maybe_save_checkpoint
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.state.diloco import mean_of_islands
from trainer.training.build import build
from trainer.training.start import start

ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "per_device_batch_size": 1, "ici_fsdp_parallelism": 2}
FOUR = ISLANDS | {"ici_diloco_parallelism": 4, "ici_fsdp_parallelism": 1}
STREAMING = {
    "enable_streaming_diloco": True,
    "num_diloco_fragments": 2,
    "num_communication_overlapping_steps": 1,
    "communication_overlapping_alpha": 0.5,
}
TIMES = {"diloco_sync_period": 4}
PLAIN = {"per_device_batch_size": 1, "ici_fsdp_parallelism": 4}
BUFFERS = {"decoder_block": "two_kinds:family", "base_num_decoder_layers": 3}  # a model with variables in `rest`


KEYS = TIMES | {"steps": 20, "opt_type": "lion"}
ONLY_START = {"load_full_state_path", "load_parameters_path", "reset_optimizer"}  # only `start` reads these keys


@functools.cache
def made(combination="nnx", /, **overrides):
    built = {key: value for key, value in overrides.items() if key not in ONLY_START}
    if built != overrides:
        return made(combination, **built)._replace(config=tiny_config(combination, devices=4, **KEYS | overrides))
    return build(load(arguments(combination, **KEYS | overrides)).config, jax.devices()[:4])


def drawn(run, updates):
    """Returns a native state whose arrays all differ, and whose counts are `updates`."""
    rng = np.random.default_rng(updates)

    def one(x):
        is_count = jnp.issubdtype(x.dtype, jnp.integer)
        return np.asarray(np.full(x.shape, updates) if is_count else rng.normal(size=x.shape)).astype(x.dtype)

    tree = jax.tree.map(one, run.codec.unpack(run.abstract_state))
    return jax.device_put(run.codec.pack(tree), run.states.shardings)


def sidecar(run):
    dataset = open_dataset(run.config, print)
    return Sidecar(to_yaml(run.config), {"identity": dataset.identity, "row": 0}, dataset.fingerprint, {})


def save(folder, run, updates):
    """Writes a run's folder with one checkpoint. Returns its canonical state on the host."""
    state = drawn(run, updates)
    with CheckpointManager(folder, run.config, print) as manager:
        assert maybe_save_checkpoint(
            manager, state, config=run.config, codec=run.codec, sidecar=lambda: sidecar(run), force=True
        )
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(updates)]  # the step of the outer state
    return copied(run.codec.unpack(state))


def begin(run, folder=None, lines=None):
    """Returns the canonical state with which `run` begins, and its number of updates."""
    dataset, say = open_dataset(run.config, print), [].append if lines is None else lines.append
    if folder is None:
        found = start(run, dataset, None, say, schedule_given=False)
    else:
        with CheckpointManager(folder, run.config, say) as manager:
            found = start(run, dataset, manager, say, schedule_given=False)
    assert jax.tree.map(lambda x: x.sharding, found.state) == run.states.shardings
    return copied(run.codec.unpack(found.state)), found.updates


@pytest.mark.parametrize("streaming", [False, True])
def test_the_whole_state_resumes_under_another_combination_and_mesh(tmp_path, streaming):
    """Also at a step that does not synchronize: islands, momentum, step and the in-flight fragment are saved."""
    keys = ISLANDS | (STREAMING if streaming else {})
    saved = save(tmp_path, made(**keys), 6)
    assert ("in_flight" in {tensor.name for tensor in jax.tree.leaves(made(**keys).states.tensors)}) == streaming
    other = keys | {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2}
    found, updates = begin(made(ALL_COMBINATIONS[-1], **other), tmp_path)
    assert updates == 6
    assert_equal_bits(found, saved)


def test_a_step_that_the_state_does_not_have_is_not_saved(tmp_path):
    run = made(**ISLANDS)
    state = drawn(run, 6)
    what = {"config": run.config, "codec": run.codec, "sidecar": lambda: sidecar(run)}
    disagreement = pytest.raises(ValueError, match="a checkpoint of 8 updates is due, but the state holds 6")
    with CheckpointManager(tmp_path, run.config, print) as manager, disagreement:
        maybe_save_checkpoint(manager, state, 8, force=True, **what)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_is_in_flight_belongs_to_streaming(tmp_path):
    save(tmp_path / "islands", made(**ISLANDS), 6)
    with pytest.raises(UserError, match="in_flight"):
        begin(made(**ISLANDS, **STREAMING, load_full_state_path=tmp_path / "islands"))
    save(tmp_path / "plain", made(**PLAIN), 6)
    found, _ = begin(made(**ISLANDS, **STREAMING, load_full_state_path=tmp_path / "plain"))
    assert found.in_flight == 0


def test_a_plain_checkpoint_is_on_every_island(tmp_path):
    saved, lines = save(tmp_path / "plain", made(**PLAIN), 6), []
    run = made(**ISLANDS, load_full_state_path=tmp_path / "plain")
    found, updates = begin(run, lines=lines)
    assert updates == found.step == 6
    for n in (0, 1):
        assert_equal_bits(jax.tree.map(lambda x, n=n: x[n], found.inner_state), saved)
    assert_equal_bits(found.params, saved.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.outer_opt_state))
    assert "on every island, 6 updates, its optimizer" in lines[-1]


def test_the_outer_parameters_start_a_plain_run(tmp_path):
    saved, lines = save(tmp_path / "islands", made(**ISLANDS), 6), []
    run = made(ALL_COMBINATIONS[-1], **PLAIN, load_full_state_path=tmp_path / "islands")
    found, updates = begin(run, lines=lines)
    assert updates == found.step == 6
    assert_equal_bits(found.params, saved.params)
    counts = [leaf for leaf in jax.tree.leaves(found.opt_state) if leaf.ndim == 0]
    assert 6 in counts  # the schedule's position
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.opt_state) if leaf.ndim)
    assert "the outer parameters, 6 updates, a fresh optimizer" in lines[-1]
    found, updates = begin(made(**PLAIN, load_parameters_path=tmp_path / "islands"))
    assert updates == 0
    assert_equal_bits(found.params, saved.params)


def test_a_fresh_optimizer_gets_the_mean_of_the_islands_buffers(tmp_path):
    """An islands' run is evaluated with these averages. A plain run and a run with more islands start from them."""
    saved = save(tmp_path / "islands", made(**ISLANDS, **BUFFERS), 6)

    def mean(leaf):
        leaf = np.asarray(leaf)
        return leaf[0] + (leaf - leaf[0]).mean(0) if np.issubdtype(leaf.dtype, np.floating) else leaf[0]

    expected = jax.tree.map(mean, saved.inner_state.rest)
    assert jax.tree.leaves(expected)
    other = BUFFERS | {"load_full_state_path": tmp_path / "islands"}
    found, _ = begin(made(ALL_COMBINATIONS[-1], **PLAIN, **other))
    assert_equal_bits((found.params, found.rest), (saved.params, expected))
    found, _ = begin(made(**FOUR, **other, reset_optimizer=True))
    assert_equal_bits(found.params, saved.params)
    for n in range(4):
        assert_equal_bits(jax.tree.map(lambda x, n=n: x[n], found.inner_state.rest), expected)


def test_loaded_weights_include_buffers(tmp_path):
    """Islands' buffers are averaged, for one device and for more islands; a plain run's buffers are taken unchanged."""
    saved = save(tmp_path / "islands", made(**ISLANDS, **BUFFERS), 6)
    expected = jax.tree.map(lambda x: np.asarray(mean_of_islands(jnp.asarray(x))), saved.inner_state.rest)
    other = BUFFERS | {"load_parameters_path": tmp_path / "islands"}
    found, updates = begin(made(ALL_COMBINATIONS[-1], **PLAIN, **other))
    assert updates == 0
    assert_equal_bits((found.params, found.rest), (saved.params, expected))
    found, _ = begin(made(**FOUR, **other))
    assert_equal_bits(found.params, saved.params)
    for n in range(4):
        assert_equal_bits(jax.tree.map(lambda x, n=n: x[n], found.inner_state.rest), expected)
    plain = save(tmp_path / "plain", made(**PLAIN, **BUFFERS), 5)
    found, _ = begin(made(**PLAIN, **BUFFERS, load_parameters_path=tmp_path / "plain"))
    assert_equal_bits((found.params, found.rest), (plain.params, plain.rest))


def test_a_fresh_optimizer_begins_on_all_islands_at_the_outer_parameters(tmp_path):
    saved = save(tmp_path, made(**ISLANDS), 6)
    found, updates = begin(made(**ISLANDS, reset_optimizer=True, diloco_outer_lr=0.7), tmp_path)
    assert updates == found.step == 6
    assert (found.inner_state.step == 6).all()
    for params in (found.params, *(jax.tree.map(lambda x, n=n: x[n], found.inner_state.params) for n in (0, 1))):
        assert_equal_bits(params, saved.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(found.outer_opt_state))


@pytest.mark.parametrize("own", [True, False])
def test_another_number_of_islands_is_refused(tmp_path, own):
    save(tmp_path, made(**ISLANDS), 6)
    shutil.copytree(tmp_path, tmp_path / "other")
    with pytest.raises(
        UserError, match=r"the number of DiLoCo's islands must not change, 2 -> 4.*load_parameters_path"
    ):
        begin(made(**FOUR), tmp_path) if own else begin(made(**FOUR, load_full_state_path=tmp_path / "other"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"diloco_sync_period": 8}, "diloco_sync_period: 4 -> 8"),
        ({"num_communication_overlapping_steps": 0}, "num_communication_overlapping_steps: 1 -> 0"),
    ],
)
def test_another_timetable_is_refused_where_a_fragment_may_be_in_flight(tmp_path, change, named):
    """Islands would never apply the in-flight fragment."""
    save(tmp_path, made(**ISLANDS, **STREAMING), 6)
    run = made(**ISLANDS | STREAMING | {"load_full_state_path": tmp_path} | change)
    with pytest.raises(UserError, match=rf"another schedule \({named}\): .*reset_optimizer=true"):
        begin(run)


def test_a_run_does_not_become_one_of_islands(tmp_path):
    save(tmp_path, made(**PLAIN), 6)
    with pytest.raises(UserError, match="enable_diloco: false -> true"):
        begin(made(**ISLANDS), tmp_path)
