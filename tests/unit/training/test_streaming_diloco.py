"""Streaming DiLoCo: fragments that synchronize in turn, with a delay and in low precision."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import arguments, assert_equal_bits, copied, tiny_config

from trainer.aot.cost import analyze
from trainer.backends.base import TrainTree
from trainer.config.load import load
from trainer.ops.paths import path_of
from trainer.optim.outer import make_outer_optimizer, sent
from trainer.sharding import get_mesh_from_config
from trainer.state.diloco import DiLoCoTrainState
from trainer.training.build import build
from trainer.training.diloco import Averaged, _synchronization, _take, build_diloco_train_step

ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 9}
SGD = {"opt_type": "sgd", "gradient_clipping_threshold": 0}
THREE = {"enable_streaming_diloco": True, "num_diloco_fragments": 3}
LATE = THREE | {"num_communication_overlapping_steps": 2, "communication_overlapping_alpha": 0.3}


def planted(devices, **keys):
    """Returns the configuration and mesh of two islands, their jitted step around `update`, and a first state.

    The parameters are one matrix in each of three layers, and a norm.
    """
    config = tiny_config("nnx", devices=devices, **ISLANDS, base_num_decoder_layers=3, steps=10, **keys)
    mesh = get_mesh_from_config(config, jax.devices()[:devices])
    rng = np.random.default_rng(0)

    def tree(matrix, norm):
        return {"decoder": {"layers": {"wo": {"kernel": matrix}}, "decoder_norm": {"scale": norm}}}

    def at(*axes):
        whole = NamedSharding(mesh, P(*axes, None, "fsdp")), NamedSharding(mesh, P(*axes))
        return tree(*whole)

    params = tree(*(rng.normal(size=shape).astype(np.float32) for shape in ((3, 16, 8), (16,))))
    outer = make_outer_optimizer(config).init(jax.device_put(params, at()))
    islands = jax.device_put(jax.tree.map(lambda leaf: np.stack([leaf] * 2), params), at("diloco"))
    inner = TrainTree(jnp.zeros(2, jnp.int32), islands, (), {})
    in_flight = jnp.int32(0) if "num_communication_overlapping_steps" in keys else None
    state = DiLoCoTrainState(inner, jax.device_put(params, at()), outer, jnp.int32(0), in_flight)
    return config, mesh, jax.jit(build_diloco_train_step(config, update, at())), state


def moved(params, row):
    """Returns an island's parameters after an update that depends on the number `row`; 0 skips it."""
    return jax.tree.map(lambda leaf: leaf - row * (0.1 * leaf + 0.02), params)


def update(tree, batch, frozen):
    return tree._replace(params=moved(tree.params, batch["row"][0])), {}


ROWS = {"row": np.float32([1, 2])}


def test_one_fragment_that_is_taken_at_once_is_plain_diloco():
    texts = []
    for keys in ({}, {"enable_streaming_diloco": True}):
        _, _, step, state = planted(4, ici_fsdp_parallelism=2, **keys)
        texts.append(step.lower(state, ROWS, ()).as_text())
    assert texts[0] == texts[1]
    assert texts[0].count("stablehlo.case") == 1


def of_fragment(number, path, leaf):
    """Returns a mask of a parameter's entries in fragment `number` of three."""
    if path_of(path)[:2] != ("decoder", "layers"):
        return np.full(leaf.shape, number == 0)
    mask = np.zeros(leaf.shape, bool)
    if number:
        mask[number - 1 :: 2] = True
    return mask


def where(number, new, old):
    """Returns `new` in a fragment, and `old` elsewhere."""

    def one(path, a, b):
        return np.where(of_fragment(number, path, np.asarray(b)), a, b)

    return jax.tree_util.tree_map_with_path(one, new, old)


def simulation(config, params, velocity, islands, updates, in_flight):
    """Returns the float64 state after `updates` updates: (params, velocity, islands, in_flight)."""
    lr, momentum, alpha = config.diloco_outer_lr, config.diloco_outer_momentum, config.communication_overlapping_alpha
    ended = updates == config.steps

    def mixed(own, param):
        return alpha * np.float64(own) + (1 - alpha) * param

    if in_flight and (updates == in_flight[0] + 2 or ended):
        islands = [where(in_flight[1], jax.tree.map(mixed, own, params), own) for own in islands]
        in_flight = None
    for number, place_ in enumerate((0, 3, 6)):
        if updates % 9 != place_ and not ended:
            continue
        grad = jax.tree.map(lambda p, *own: np.mean([np.float64(p) - it for it in own], 0), params, *islands)
        new_velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grad)
        new = jax.tree.map(lambda p, v, g: p - lr * (momentum * v + g), params, new_velocity, grad)
        params, velocity = where(number, new, params), where(number, new_velocity, velocity)
        in_flight = (updates, number)
    return (params, velocity, [params, params], None) if ended else (params, velocity, islands, in_flight)


def assert_close(left, right, rtol=2e-5):
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (left, right)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max(initial=1e-3), rtol=0, err_msg=str(path))


def test_fragments_that_arrive_late_against_numpy():
    """The last step is between a synchronization and its arrival. An island skips one update where a fragment arrives,
    and one where a fragment synchronizes."""
    config, _, step, state = planted(2, **LATE)
    params = copied(state.params)
    islands, velocity, in_flight = [params] * 2, jax.tree.map(np.zeros_like, params), None
    for i in range(10):
        rows = np.float32([i % 3 + 1, i % 4 + 0.5])
        if i + 1 in (5, 6):
            rows[6 - (i + 1)] = 0
        state, metrics = step(state, {"row": rows}, ())
        found, before = copied(state), velocity
        own = [moved(island, row) for island, row in zip(islands, rows, strict=True)]
        params, velocity, islands, in_flight = simulation(config, params, velocity, own, i + 1, in_flight)
        assert_close(found.params, params)
        assert_close(found.outer_opt_state[0].trace, velocity, rtol=1e-3)  # differences of rounded numbers
        for island in (0, 1):
            assert_close(jax.tree.map(lambda x, n=island: x[n], found.inner_state.params), islands[island])
        assert found.in_flight == (in_flight[0] if in_flight else 0)
        assert (metrics["outer"]["outer_grad_norm"] > 0) == (i + 1 in (3, 6, 9, 10))
    grads = jax.tree.map(lambda new, old: new - config.diloco_outer_momentum * old, velocity, before)
    norm = np.sqrt(sum((grad**2).sum() for grad in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["outer"]["outer_grad_norm"], norm, rtol=1e-3)  # of all fragments
    for island in (0, 1):
        assert_equal_bits(jax.tree.map(lambda x, n=island: x[n], found.inner_state.params), found.params)


# For each dtype of an island's outer gradient: (dtype and kind of the collective, received bytes per number).
SENT = {"float32": ("f32", "all-reduce", 4), "bfloat16": ("u16", "all-gather", 2 * 2), "int8": ("s8", "all-gather", 2)}


@pytest.mark.parametrize("dtype", SENT)
def test_what_a_synchronization_sends_between_islands(dtype):
    """Each parameter of a device is sent once, in the requested dtype. Steps without synchronization send nothing."""
    _, mesh, step, state = planted(4, **LATE, ici_fsdp_parallelism=2, diloco_outer_grad_dtype=dtype)
    text = step.lower(state, ROWS, ()).compile().as_text()
    found = [it for it in analyze(text, mesh).collectives if "diloco" in it.axes]
    assert all(it.conditional for it in found)
    shape, kind, size = SENT[dtype]
    sent = [it for it in found if it.dtype == shape and it.size > 16]
    assert {it.kind for it in sent} == {kind}
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.params)]
    assert sum(it.size * it.count for it in sent) == pytest.approx(size * sum(map(np.prod, shards)), rel=0.02)


def test_rounded_gradients_are_near_the_exact_ones():
    mesh = jax.make_mesh((2, 2), ("diloco", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    grads = np.random.default_rng(0).normal(size=(2, 4, 3, 16)) * 10.0 ** np.arange(-3, 0)[:, None]
    grads = grads.astype(np.float32)
    grads[1, 2] = 0
    programs = {
        dtype: jax.jit(functools.partial(sent, dtype, shardings=sharding)).lower(grads).compile() for dtype in SENT
    }
    for dtype in ("bfloat16", "int8"):
        shape, kind, _ = SENT[dtype]
        found = analyze(programs[dtype].as_text(), mesh).collectives
        assert (shape, kind) in {(it.dtype, it.kind) for it in found}, "sent in another dtype"
    rounded = {dtype: np.asarray(program(grads)) for dtype, program in programs.items()}
    np.testing.assert_array_equal(rounded["float32"], grads)
    np.testing.assert_array_equal(rounded["bfloat16"], grads.astype(ml_dtypes.bfloat16).astype(np.float32))
    error = np.abs(rounded["int8"] - grads)
    largest = np.abs(grads).max(-1, keepdims=True)
    assert (error <= largest / 127 * 0.5001).all()
    assert (error > 0).any()
    grads[0, 1, 0, 3] = np.nan
    broken = np.asarray(programs["int8"](grads))
    np.testing.assert_array_equal(np.isnan(broken).all(-1), np.isnan(grads).any(-1))
    assert np.isnan(broken).sum() == 16


def test_what_did_not_move_keeps_its_bits_when_it_is_mixed():
    param = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    mixed = _take(None, 0.3, Averaged({"w": np.stack([param, param])}, {"w": param}, None, {}))
    assert_equal_bits(jax.tree.map(np.asarray, mixed.islands), {"w": np.stack([param, param])})


def test_islands_that_take_at_once_mix_their_own_share_except_after_the_last_step():
    keys = {"enable_streaming_diloco": True, "num_diloco_fragments": 1, "communication_overlapping_alpha": 0.25}
    keys |= SGD | ISLANDS | {"diloco_sync_period": 3, "steps": 9, "per_device_batch_size": 1}
    run = build(load(arguments("nnx", **keys)).config, jax.devices()[:2])
    tree = run.codec.unpack(run.abstract_args()[0])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), tree.params)
    islands = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), tree.inner_state.params)
    velocity = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree.outer_opt_state)
    synchronize = jax.jit(_synchronization(run.config, run.param_shardings.storage))
    begin = Averaged(islands, params, velocity, tree.inner_state.rest)
    for updates in (2, 3, 9):
        new, _ = copied(synchronize(begin, None, jnp.int32(updates)))
        if updates == 2:
            assert_equal_bits(new.islands, islands)
        elif updates == 3:
            share = jax.tree.map(lambda own, outer: 0.25 * np.float64(own) + 0.75 * outer, islands, new.params)
            assert_close(new.islands, share)
        else:
            assert_equal_bits(new.islands, jax.tree.map(lambda outer: np.stack([outer] * 2), new.params))
