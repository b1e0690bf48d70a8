"""Multi-token prediction: modules behind the model that predict further tokens (DeepSeek-V3, arXiv:2412.19437, 2.2).

Module k = 1, 2, ... reads, at token t, the embedding of token t + k and the hidden states h_{k-1} of module k - 1, and
makes h_k, from which the model's head predicts token t + k + 1:

    h_k = norm(block(projection([norm(embedding of token t + k); norm(h_{k-1})])))

h_0 are the model's own hidden states. Each h is the input of the head: after the norm and after dropout
(docs/decisions/0015-multi-token-prediction.md). The block is of the kind of the last layer; embedding and head are the
model's. This module serves NNX and Linen. The letters in shapes are those of `ops`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.layers.context import Context
from trainer.layers.dense import INPUT, RESIDUAL, Dense
from trainer.layers.sown import Activation, MtpHidden, Sown
from trainer.layers.stack import MakeBlock
from trainer.models.families import family, stacks
from trainer.models.norms import make_norm
from trainer.ops.ahead import shift_left, still_inside
from trainer.ops.dropout import dropout

MTP = "mtp_block"  # what all paths of the modules begin with
# The parts of a module, in the order of its forward pass, by their names without the module's prefix.
EMBEDDING_NORM, HIDDEN_NORM, PROJECTION = "embedding_norm", "hidden_state_norm", "projection"
BLOCK, FINAL_NORM = "transformer_layer", "final_norm"
# Dropout sites of a module outside of its block.
EMBEDDING, BEFORE_HEAD = range(2)

Types = tuple[type[nnx.Variable], ...]
# (k, name of a part) -> that part of module k, which can be called
Parts = Callable[[int, str], Any]


def depths(config: Any) -> range:
    """The numbers of the modules, from 1."""
    return range(1, config.mtp_num_layers + 1)


def part_name(k: int, part: str) -> str:
    """The name of a part of module `k` within it."""
    return f"mtp_{k}_{part}"


def part_path(k: int, part: str) -> str:
    """The path of a part of module `k` in the model."""
    return f"{MTP}/mtp_layer_{k}/{part_name(k, part)}"


def hidden_path(k: int) -> str:
    """The path of h_k, a sown `MtpHidden`."""
    return f"{MTP}/mtp_layer_{k}/output"


def last_block(config: Any) -> tuple[str, MakeBlock]:
    """The block of the last layer: the path of its parameters in the decoder, and what makes it."""
    last = stacks(config)[-1]
    return last.paths[-1], last.blocks[-1]


def make_projection(config: Any, rngs: nnx.Rngs) -> Dense:
    """The projection of a module, from twice the width: first the embedding, then the hidden states."""
    return Dense(
        [2 * config.base_emb_dim],
        [config.base_emb_dim],
        ("embed", "mlp"),  # so that the tensor axes split it, as they do the residuals that it makes
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        make_product=family(config.decoder_block).make_product,
        rngs=rngs,
    )


class MtpLayer(nnx.Module):
    """The parts of module `k`. `make_block(block, rngs)` makes its block."""

    def __init__(self, config: Any, k: int, make_block: Callable[..., Any], rngs: nnx.Rngs):
        parts = {part: make_norm(config) for part in (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)}
        for part, made in parts.items():
            setattr(self, part_name(k, part), made)
        setattr(self, part_name(k, PROJECTION), make_projection(config, rngs))
        setattr(self, part_name(k, BLOCK), make_block(last_block(config)[1], rngs))


class MtpBlock(nnx.Module):
    """All modules."""

    def __init__(self, config: Any, make_block: Callable[..., Any], rngs: nnx.Rngs):
        for k in depths(config):
            setattr(self, f"mtp_layer_{k}", MtpLayer(config, k, make_block, rngs))

    def part(self, k: int, name: str) -> Any:
        """See `Parts`."""
        return getattr(getattr(self, f"mtp_layer_{k}"), part_name(k, name))


def run_mtp(
    config: Any,
    part: Parts,
    run_block: Callable[..., tuple[jax.Array, Sown]],
    x_bte: jax.Array,
    hidden_bte: jax.Array,
    context: Context,
    types: Types,
) -> Sown:
    """Run the modules: returns the sown values of the modules and their blocks, with `MtpHidden`.

    A token whose k successors are not all in its segment is padding for module k, since it bears no loss there. The
    positions are those of the token t itself: RoPE depends only on their differences, and the first in a segment
    stays 0.

    Args:
      run_block: `run_block(held, x, context, types) -> x, sown` of one block, `held` from `part(k, BLOCK)`.
      x_bte: the embeddings of the inputs.
      hidden_bte: h_0.
      context: of the model.
    """
    layers, count = sum(stack.layers for stack in stacks(config)), config.mtp_num_layers
    rate = config.dropout_rate if config.enable_dropout else 0.0
    sown: dict[str, dict[str, jax.Array]] = {kind.__name__: {} for kind in types}
    for k in depths(config):
        context = context._replace(segments=still_inside(context.segments))
        x_bte = shift_left(x_bte)
        # Numbers of layers: those of the stacks, one for the sites outside of them, then these.
        outside = context.at(layers + count + k)
        embedding = jnp.where((context.segments != 0)[..., None], x_bte, 0)
        embedding = dropout(embedding, outside.at(EMBEDDING).key, context.rows, rate)
        joined = jnp.concatenate([part(k, EMBEDDING_NORM)(embedding), part(k, HIDDEN_NORM)(hidden_bte)], axis=-1)
        projected = part(k, PROJECTION)(sharding.constrain(joined, INPUT), RESIDUAL)
        y, found = run_block(part(k, BLOCK), projected, context.at(layers + k), types)
        hidden_bte = dropout(part(k, FINAL_NORM)(y), outside.at(BEFORE_HEAD).key, context.rows, rate)
        for name, values in found.items():
            sown[name] |= {f"{part_path(k, BLOCK)}/{path}": value for path, value in values.items()}
        own = {MtpHidden: (hidden_path(k), hidden_bte), Activation: (part_path(k, PROJECTION), projected)}
        for kind, (path, value) in own.items():
            if kind in types:
                sown[kind.__name__][path] = value
    return sown
