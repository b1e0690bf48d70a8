"""Multi-token prediction: modules after the model predict further tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2).

At token t, module k = 1, 2, ... reads the embedding of token t + k and the hidden states h_{k-1} of module k - 1. It
computes h_k, from which the model's output head predicts token t + k + 1:

    h_k = norm(block(projection([norm(embedding of token t + k); norm(h_{k-1})])))

h_0 are the model's hidden states. All h_k are hidden states after a final norm and dropout, as the output head reads
them (docs/decisions/0015-multi-token-prediction.md). The block has the same class as the model's last layer. The
modules share the model's embedding and output head. The NNX and the Linen model both use this file. `trainer.ops`
explains the letters in shapes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.config.keys import Config
from trainer.layers.dense import INPUT, RESIDUAL, Dense
from trainer.layers.sown import Activation, MtpHidden, Sown
from trainer.layers.stack import MakeBlock
from trainer.models.families import stacks, with_products
from trainer.models.norms import make_norm
from trainer.ops.dropout import dropout
from trainer.products.context import Context

MTP = "mtp_block"  # the first component of every module's path
# The names of a module's parts, without the module's prefix, in the order of the forward pass.
EMBEDDING_NORM, HIDDEN_NORM, PROJECTION = "embedding_norm", "hidden_state_norm", "projection"
BLOCK, FINAL_NORM = "transformer_layer", "final_norm"
# The indices of a module's dropout sites outside of its block.
EMBEDDING, BEFORE_HEAD = range(2)

Types = tuple[type[nnx.Variable], ...]
# Maps (k, part name) to that part of module k. A part is callable.
Parts = Callable[[int, str], Any]


class Ahead(NamedTuple):
    """The tokens that the modules read ahead of each token t, and their segments: int [b, t, modules].

    Module k has index k - 1 on the last axis. The model's inputs do not determine token t + k, because a row may store
    its tokens in any order.
    """

    tokens: jax.Array  # token t + k
    segments: jax.Array  # the segment of token t if the next k tokens are in it, too; else 0


def embedded(embed: Callable[[jax.Array], jax.Array], inputs: jax.Array, ahead: Ahead | None) -> tuple[jax.Array, Any]:
    """Returns the embeddings of `inputs` [b, t] and of `ahead.tokens`: [b, t, e] and [modules, b, t, e]. If `ahead`
    is None, so is the second result.

    One lookup computes both results, so that the gradient of the table is summed, reduced and stored once.
    """
    if ahead is None:
        return embed(inputs), None
    x = embed(jnp.stack([inputs, *jnp.moveaxis(ahead.tokens, -1, 0)]))
    return x[0], x[1:]


def depths(config: Config) -> range:
    """Returns the numbers of the modules, starting with 1."""
    return range(1, config.mtp_num_layers + 1)


def part_name(k: int, part: str) -> str:
    """Returns the last component of the path of a part of module `k`."""
    return f"mtp_{k}_{part}"


def module_path(k: int) -> str:
    """Returns the path of module `k` in the model."""
    return f"{MTP}/mtp_layer_{k}"


def part_path(k: int, part: str) -> str:
    """Returns the path of a part of module `k` in the model."""
    return f"{module_path(k)}/{part_name(k, part)}"


def hidden_path(k: int) -> str:
    """Returns the path at which h_k is sown as `MtpHidden`."""
    return f"{module_path(k)}/output"


def last_block(config: Config) -> tuple[str, MakeBlock]:
    """Returns the path of the last layer's parameters within the decoder, and the class or partial that makes the
    layer's block."""
    last = stacks(config)[-1]
    return last.paths[-1], last.blocks[-1]


def make_projection(config: Config, k: int, rngs: nnx.Rngs) -> Dense:
    """Returns the projection of module `k`, which reads the concatenation of an embedding and hidden states."""
    dense = Dense(
        [2 * config.base_emb_dim],
        [config.base_emb_dim],
        ("embed", "mlp"),  # the output is sharded over the tensor axes, like residuals
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        rngs=rngs,
    )
    return with_products(config, part_path(k, PROJECTION), dense, rngs)


class MtpLayer(nnx.Module):
    """The parts of module `k`. `make_block(block, path, rngs)` makes its block."""

    def __init__(self, config: Config, k: int, make_block: Callable[..., Any], rngs: nnx.Rngs):
        parts = {part: make_norm(config) for part in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)}
        for part, made in parts.items():
            setattr(self, part_name(k, part), made)
        setattr(self, part_name(k, PROJECTION), make_projection(config, k, rngs))
        setattr(self, part_name(k, BLOCK), make_block(last_block(config)[1], part_path(k, BLOCK), rngs))


class MtpBlock(nnx.Module):
    """All multi-token prediction modules."""

    def __init__(self, config: Config, make_block: Callable[..., Any], rngs: nnx.Rngs):
        for k in depths(config):
            setattr(self, f"mtp_layer_{k}", MtpLayer(config, k, make_block, rngs))

    def part(self, k: int, name: str) -> Any:
        return getattr(getattr(self, f"mtp_layer_{k}"), part_name(k, name))


def run_mtp(
    config: Config,
    part: Parts,
    run_block: Callable[..., tuple[jax.Array, Sown]],
    x_kbte: jax.Array,
    hidden_bte: jax.Array,
    context: Context,
    ahead: Ahead,
    types: Types,
) -> Sown:
    """Runs the modules. Returns the sown values of the modules and their blocks, including `MtpHidden`.

    For module k, a token whose segment does not contain the next k tokens is padding and does not contribute to the
    loss. Module k uses the position of token t, not of token t + k. This changes nothing in RoPE, which depends only on
    differences between positions, and the positions in a segment still start at 0.

    Args:
      run_block: runs one block: `run_block(part(k, BLOCK), x, context, types) -> x, sown`.
      x_kbte: the embeddings of `ahead.tokens`, [modules, b, t, e].
      hidden_bte: h_0, the model's hidden states.
      context: the model's context.
    """
    layers, count = sum(stack.layers for stack in stacks(config)), config.mtp_num_layers
    rate = config.dropout_rate if config.enable_dropout else 0.0
    sown: dict[str, dict[str, jax.Array]] = {kind.__name__: {} for kind in types}
    for k in depths(config):
        context = context._replace(segments=ahead.segments[..., k - 1], documents=None)
        # Layer numbers are assigned in this order: to the layers of the stacks; to the dropout sites outside of the
        # stacks (one number); to the blocks of the modules; and to the other parts of each module (one number each).
        outside = context.at(layers + count + k)
        embedding = jnp.where((context.segments != 0)[..., None], x_kbte[k - 1], 0)
        embedding = dropout(embedding, outside.at(EMBEDDING).key, context.rows, rate)
        joined = jnp.concatenate([part(k, EMBEDDING_NORM)(embedding), part(k, HIDDEN_NORM)(hidden_bte)], axis=-1)
        projected = part(k, PROJECTION)(sharding.constrain(joined, INPUT), RESIDUAL, outside)
        y, found = run_block(part(k, BLOCK), projected, context.at(layers + k), types)
        hidden_bte = dropout(part(k, FINAL_NORM)(y), outside.at(BEFORE_HEAD).key, context.rows, rate)
        for name, values in found.items():
            sown[name] |= {f"{part_path(k, BLOCK)}/{path}": value for path, value in values.items()}
        own = {MtpHidden: (hidden_path(k), hidden_bte), Activation: (part_path(k, PROJECTION), projected)}
        for kind, (path, value) in own.items():
            if kind in types:
                sown[kind.__name__][path] = value
    return sown
