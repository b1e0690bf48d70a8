"""Helpers that tests share."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from trainer.backends.registry import MODELS
from trainer.config.flags import flags_of
from trainer.config.load import load
from trainer.config.resolve import resolve

# Tests are parametrized over this, so that removing a combination removes its cases.
ALL_COMBINATIONS = tuple(MODELS)
# Argument `cases` of the mark `rest`, for a test that runs the first and the last combination. Empty once there is only
# one combination.
LAST_CASE = ALL_COMBINATIONS[1:][-1:]

TINY = {
    "dataset_type": "synthetic",
    "base_emb_dim": 16,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "logits_via_embedding": True,
    "max_target_length": 16,
    "steps": 20,
    "eval_interval": -1,
    "per_device_batch_size": 4,
    "enable_checkpointing": False,  # a run writes only what a test needs
}

# Every kind of matrix: a layer with latent attention and an MLP, then one with a router, experts and a shared expert.
EVERY_MATRIX = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "base_num_kv_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 16,
    "shared_experts": 1,
    "first_num_dense_layers": 1,
    "logits_via_embedding": False,
}


def pinned(combination: str) -> dict[str, bool]:
    """Returns the three flags of a combination, written out, so that the test does not depend on base.yml."""
    return flags_of(combination)


def arguments(combination: str, **overrides: Any) -> list[str]:
    """Returns a tiny configuration as command-line arguments, with its combination pinned."""
    values = TINY | pinned(combination) | overrides
    return ["base.yml", *(f"{key}={value}" for key, value in values.items())]


def tiny_config(combination: str, *, devices: int = 1, **overrides: Any):
    """Returns a resolved tiny configuration for `devices` CPU devices."""
    return resolve(load(arguments(combination, **overrides)).config, device_count=devices, platform="cpu")


@functools.cache
def model_of(config: Any) -> Any:
    """Returns the model of `config`, traced once per process. Not for tests that patch the model's blocks."""
    from trainer.backends.registry import make_model

    return make_model(config)


def random_variables(model: Any, scale: float = 0.3) -> Any:
    """Returns (params, rest) of `model`, drawn on the host without compiling `init`, large enough that tokens
    differ."""
    import jax

    rng = np.random.default_rng(0)

    def random(leaf: Any) -> np.ndarray:
        if leaf.dtype.kind in "iu":
            return rng.integers(-7, 8, leaf.shape).astype(leaf.dtype)
        return rng.normal(0, scale, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(random, model.abstract)


def draw_simply(logits: Any, sampling: Any, keys: Any, positions: Any) -> Any:
    """Replaces `trainer.inference.sampling.draw`, which takes half of the compile time of a tiny model's decode step.
    Compiles in a quarter of that time. top_k and nucleus_p only change the noise."""
    import jax
    import jax.numpy as jnp

    scaled = logits.astype(jnp.float32) / jnp.where(sampling.temperature > 0, sampling.temperature, 1)[:, None]
    numbers = positions + sampling.top_k + (1000 * sampling.nucleus_p).astype(jnp.int32)
    drawn = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in)(keys, numbers), scaled)
    return jnp.where(sampling.temperature > 0, drawn, logits.argmax(-1)).astype(jnp.int32)


def drawn(make: Callable[[], Any]) -> Any:
    """Returns the NNX module that `make` makes, with random parameters. One-axis parameters, such as scales, are
    between 0.5 and 1.5. All are drawn on the host, because JAX compiles a program for each shape of an initial
    value."""
    import jax
    from flax import nnx

    module, rng = nnx.eval_shape(make), np.random.default_rng(0)
    for _, leaf in nnx.iter_graph(module):
        if isinstance(leaf, nnx.Param):
            bound = (3 / max(leaf.shape)) ** 0.5  # the variance is 1 / the longest axis
            low, high = (0.5, 1.5) if leaf.ndim == 1 else (-bound, bound)
            leaf.set_value(jax.device_put(rng.uniform(low, high, leaf.shape).astype(leaf.dtype)))
    return module


def packed_batch(config, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random rows with up to three segments and some padding: a batch like those of trainer.data."""
    rng = np.random.default_rng(seed)
    length = config.max_target_length
    ends = np.sort(rng.integers(1, length + 1, (rows, 3)), axis=1)
    index = np.arange(length)
    segment = 1 + (index[None, :, None] >= ends[:, None, :]).sum(-1)
    segment[segment > 3] = 0  # padding after the last segment
    first = np.concatenate([np.ones((rows, 1), bool), segment[:, 1:] != segment[:, :-1]], axis=1)
    position = index - np.maximum.accumulate(np.where(first, index, 0), axis=1)
    tokens = rng.integers(0, config.vocab_size, (2, rows, length))
    batch = {
        "inputs": tokens[0],
        "targets": tokens[1],
        "inputs_position": position,
        "inputs_segmentation": segment,
        "targets_segmentation": segment,
        "row": np.arange(rows),
    }
    return {name: array.astype(np.int32) for name, array in batch.items()}


def compiled(fn: Any, *args: Any) -> Any:
    """Returns `fn`, compiled for `args`."""
    import jax

    return jax.jit(fn).lower(*args).compile()


def first_tree(run: Any, params: Any = None) -> Any:
    """Returns the canonical first state of `run`, with these parameters or random ones. It is made on the host, because
    `run.init` takes half as long to compile as a step. Not for state that does not begin with zeros, such as an average
    of parameters."""
    import jax

    tree = zeros(run.codec.unpack(run.abstract_state))
    params = random_params(tree.params) if params is None else params
    if hasattr(tree, "inner_state"):  # every island begins at the outer parameters
        inner = tree.inner_state
        islands = jax.tree.map(lambda leaf, of: np.broadcast_to(leaf.astype(of.dtype), of.shape), params, inner.params)
        tree = tree._replace(inner_state=inner._replace(params=islands))
    return tree._replace(params=params)


def random_params(abstract: Any) -> Any:
    """Returns random parameters with the shapes and dtypes of `abstract`, on the host."""
    import jax

    rng = np.random.default_rng(0)

    def drawn(path: Any, leaf: Any) -> Any:
        is_scale = path[-1].key == "scale"
        return (rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5 + is_scale).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, abstract)


def state_from(run: Any, tree: Any) -> Any:
    """Returns the native train state of `run` with the leaves of the TrainTree `tree`, without compiling anything."""
    import jax

    return jax.device_put(run.codec.pack(tree), run.states.shardings)


def lowered_update(run: Any) -> Any:
    """Lowers the update of the canonical train state. Its text is the same in all combinations."""
    import jax

    state, *others = run.abstract_args()
    return jax.jit(run.computation.update).lower(run.codec.unpack(state), *others)


def lowered_gradients(run: Any) -> Any:
    """Lowers the first half of `lowered_update`, in which only the model depends on the combination."""
    import jax

    from trainer.training.step import make_gradients

    state, *others = run.abstract_args()
    gradients = make_gradients(run.config, run.objective, run.param_shardings)
    return jax.jit(run.sharded(gradients)).lower(run.codec.unpack(state), *others)


def zeros(abstract: Any) -> Any:
    """Returns zeros with the shapes and dtypes of `abstract`, on the host, without compiling a program for each leaf.
    Most optimizers' first states are zeros."""
    import jax

    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)


def copied(tree: Any) -> Any:
    """Copies the arrays of `tree` to the host. A plain device_get may return a view of a buffer that a later step
    overwrites."""
    import jax

    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def assert_equal_bits(left: Any, right: Any) -> None:
    """Checks that two pytrees have the same structure and, at every leaf, the same dtype, shape and bits."""
    import jax

    leaves, structure = jax.tree_util.tree_flatten_with_path(left)
    others, other_structure = jax.tree_util.tree_flatten_with_path(right)
    assert structure == other_structure
    for (path, a), (_, b) in zip(leaves, others, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, f"{name}: {a.dtype} and {b.dtype}"
        assert a.tobytes() == b.tobytes(), f"{name} differs by up to {np.abs(a.astype(float) - b.astype(float)).max()}"
