"""The decoder-only transformer: embedding, stacks of blocks, norm, head."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.config.capabilities.kernels import read_documents
from trainer.config.keys import Config
from trainer.layers.cache import Cache, Layers
from trainer.layers.dense import Dense, Embed, PositionEmbed
from trainer.layers.loop import Loop
from trainer.layers.run import run_module, run_modules
from trainer.layers.sown import Activation, Sown, sow
from trainer.layers.stack import MakeBlock, Stack, make_stack
from trainer.models.families import family, stacks, with_products
from trainer.models.mtp import Ahead, MtpBlock, Types, embedded, run_mtp
from trainer.models.norms import make_norm
from trainer.models.remat import remat_policy
from trainer.ops.documents import lengths
from trainer.ops.dropout import dropout
from trainer.ops.multiplied import multiplied
from trainer.products.context import Context

# Dropout sites outside of the blocks. Their PRNG keys are derived as if the sites were in an additional last layer.
EMBEDDING, BEFORE_HEAD = range(2)


def make_logits_dense(config: Config, rngs: nnx.Rngs) -> Dense:
    """Makes the output head of a model with untied embeddings."""
    dense = Dense(
        [config.base_emb_dim],
        [config.vocab_size],
        ("embed", "vocab"),
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        reduces_early=True,
        rngs=rngs,
    )
    return with_products(config, "decoder/logits_dense", dense, rngs)


def make_embedder(config: Config, rngs: nnx.Rngs) -> Embed:
    """Makes the embedding table, which may also be the output head."""
    scale = family(config.decoder_block).embedding_scale
    embed = Embed(
        config.vocab_size,
        config.base_emb_dim,
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        scale=(scale(config) if scale else 1.0) * config.embedding_multiplier,
        rngs=rngs,
    )
    return with_products(config, "token_embedder", embed, rngs) if config.logits_via_embedding else embed


def make_position_embedder(config: Config, rngs: nnx.Rngs) -> PositionEmbed:
    """Makes the table of learned position embeddings."""
    return PositionEmbed(
        config.trainable_position_size,
        config.base_emb_dim,
        dtype=jnp.dtype(config.dtype),
        weight_dtype=jnp.dtype(config.weight_dtype),
        rngs=rngs,
    )


def learned_positions(config: Config) -> bool:
    """Returns whether the decoder adds a learned position embedding to its input."""
    return config.trainable_position_size > 0


def head_matrix(config: Config) -> tuple[str, ...]:
    """Returns the canonical path of the matrix of the output head.

    The head reads only this parameter and any parameters that its product (`trainer.products`) stores next to it.
    """
    if config.logits_via_embedding:
        return ("token_embedder", "embedding")
    return ("decoder", "logits_dense", "kernel")


def casts_in_loop(config: Config) -> bool:
    """Returns whether the body of a rolled loop casts the weights (`layers.loop.cast_in_loop`).

    Under Zero-1 it does not, because the step all-gathers the weights before the loop, and casting them before the
    all-gather halves the transferred bytes.
    """
    return not config.shard_optimizer_over_data


def loop_options(config: Config, stack: Stack) -> dict[str, Any]:
    """Returns the arguments of `layers.run.run_stack` that determine how the stack's loop or pipeline runs."""
    remat = remat_policy(config)
    if stack.pipeline is None:
        scan = config.scan_layers
        return {"scan": scan, "remat": remat, "cast_inside": scan and casts_in_loop(config)}
    cast_inside = stack.pipeline.scan and casts_in_loop(config)
    return {"remat": remat, "remat_stage": remat and remat_policy(config, stage=True), "cast_inside": cast_inside}


def outer_dropout(config: Config, x_bte: jax.Array, context: Context, site: int) -> jax.Array:
    """Applies dropout at a site outside of the blocks."""
    key = context.at(sum(stack.layers for stack in stacks(config))).at(site).key
    return dropout(x_bte, key, context.rows, config.dropout_rate if config.enable_dropout else 0.0)


def first_input(config: Config, x_bte: jax.Array, positions: Callable[[], Any], context: Context) -> jax.Array:
    """Returns the first block's input, given embedded tokens. `positions()` returns the table of learned positions; it
    is called only if the model has one."""
    if learned_positions(config):
        x_bte = x_bte + positions()(context.positions)
    return outer_dropout(config, x_bte, context, EMBEDDING)


def make_context(config: Config, cache: Cache | None, positions: jax.Array, segments: jax.Array, *rest: Any) -> Context:
    """Returns the context of the decoder. `rest`: the fields of `Context` from `rows` up to `ranks`."""
    context, most = Context(positions, segments, *rest), None
    if cache is None:
        most = read_documents(config, sharding.capability_of_mesh())
    return context if most is None else context._replace(documents=lengths(segments, most))


def finish_logits(config: Config, logits_btv: jax.Array) -> jax.Array:
    """Returns the head's logits, scaled and soft-capped as configured."""
    if config.logits_via_embedding and config.normalize_embedding_logits:
        logits_btv = logits_btv / config.base_emb_dim**0.5
    logits_btv = multiplied(logits_btv, config.logits_multiplier)
    if cap := config.final_logits_soft_cap:
        logits_btv = (cap * jnp.tanh(logits_btv.astype(jnp.float32) / cap)).astype(logits_btv.dtype)
    return logits_btv


class Decoder(nnx.Module):
    """Learned positions (if any), the blocks, the final norm and, unless the embedding table is the head, the head."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        for name, layers in self.make_layers(rngs).items():
            setattr(self, name, layers)
        if learned_positions(config):
            self.position_embedder = make_position_embedder(config, rngs)
        self.decoder_norm = make_norm(config)
        if not config.logits_via_embedding:
            self.logits_dense = make_logits_dense(config, rngs)

    def make_layers(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """Returns a dict from the name of each stack to its layers. The decoder stores the layers in the attribute with
        this name."""
        return {
            stack.name: make_stack(stack, list(map(self._maker, stack.blocks, stack.paths)), rngs)
            for stack in stacks(self.config)
        }

    def _maker(self, block: MakeBlock, path: str) -> Callable[[nnx.Rngs], nnx.Module]:
        return lambda rngs: with_products(self.config, f"decoder/{path}", block(self.config, rngs), rngs)

    @classmethod
    def make_block(cls, config: Config, block: MakeBlock, path: str, rngs: nnx.Rngs) -> Any:
        """Makes a block that belongs to no stack. `path`: its canonical name."""
        return with_products(config, path, block(config, rngs), rngs)

    def run_block(self, held: Any, x: jax.Array, context: Context, types: Types) -> tuple[jax.Array, Sown]:
        """Runs a block from `make_block`; see `layers.loop.run_layer`."""
        return run_module(held, x, context, types, remat_policy(self.config))

    def run_layers(self, x: jax.Array, cache: Cache | None, context: Context, types: Types) -> tuple[Any, Any, Sown]:
        """Runs the stacks. Returns the last block's output, the cache, and the sown values."""
        config = self.config

        def run(loop: Loop, x: jax.Array, entries: Any) -> tuple[Any, Any, Sown]:
            return run_modules(loop, getattr(self, loop.stack.name), x, entries, **loop_options(config, loop.stack))

        return run_stacks(config, run, x, cache, context, types)

    def __call__(
        self, x_bte: jax.Array, cache: Cache | None, context: Context, types: Types = ()
    ) -> tuple[jax.Array, Cache | None]:
        """Maps embedded tokens [b, t, e] to normalized hidden states [b, t, e], and returns them with the cache."""
        x = first_input(self.config, x_bte, lambda: self.position_embedder, context)
        x, cache, sown = self.run_layers(x, cache, context, types)
        _sow_all(self, types, sown)
        return outer_dropout(self.config, self.decoder_norm(x), context, BEFORE_HEAD), cache


def run_stacks(
    config: Config, run: Callable[..., Any], x: jax.Array, cache: Cache | None, context: Context, types: Types
) -> tuple[jax.Array, Cache | None, Sown]:
    """Calls `run(loop, x, entries)` for each stack of the decoder in order, where `entries` is the stack's cache; see
    `layers.run.run_stack`. Returns the last stack's output, the cache, and the sown values."""
    entries, first = {}, 0
    sown: dict[str, dict[str, jax.Array]] = {variable_type.__name__: {} for variable_type in types}
    for stack in stacks(config):
        held = [None] * len(stack.blocks) if cache is None else cache.entries[stack.name]
        loop = Loop(stack, first, context, types, cache or Cache(None), by_layer=isinstance(held[0], Layers))
        x, entries[stack.name], found = run(loop, x, held)
        for name, values in found.items():
            sown[name] |= values
        first += stack.layers
    return x, None if cache is None else Cache(entries, filled=True), sown


def _sow_all(module: nnx.Module, types: Types, sown: Sown) -> None:
    for variable_type in types:
        for path, value in sown[variable_type.__name__].items():
            sow(module, variable_type, path, value)


class Transformer(nnx.Module):
    """A decoder-only language model.

    `decoder`: the class of its decoder. A class other than `Decoder` must have the same parameters as `Decoder`.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, decoder: type[Decoder] = Decoder):
        self.config = config
        self.token_embedder = make_embedder(config, rngs)
        self.decoder = decoder(config, rngs)
        if config.mtp_num_layers:
            self.mtp_block = MtpBlock(config, functools.partial(decoder.make_block, config), rngs)

    def hidden(
        self,
        inputs: jax.Array,
        inputs_position: jax.Array,
        inputs_segmentation: jax.Array,
        row: jax.Array,
        cache: Cache | None = None,
        key: jax.Array | None = None,
        types: Types = (),
        sampled: jax.Array | None = None,
        ranks: jax.Array | None = None,
        ahead: Ahead | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Returns the input of the head, [b, t, e], and the cache.

        Args:
          inputs, inputs_position, inputs_segmentation: int [b, t]; the batch fields with these names. Without a cache,
            a row must not have more documents than a row of the configured data can have.
          row: int [b], each row's index in the global batch.
          cache: the cache of earlier positions (`models.caches.init_cache`), or None.
          key: the PRNG key for the step's dropout, or None for no dropout.
          types: the types of sown values that the caller captures.
          sampled, ranks: see `products.context.Context`.
          ahead: the input of the multi-token prediction modules; None: these modules do not run.
        """
        x, further = embedded(self.token_embedder, inputs, ahead)
        sow(self, Activation, "embedding", x)
        context = make_context(self.config, cache, inputs_position, inputs_segmentation, row, key, sampled, ranks)
        hidden, cache = self.decoder(x, cache, context, types)
        if ahead is not None:
            part, run_block = self.mtp_block.part, self.decoder.run_block
            found = run_mtp(self.config, part, run_block, further, hidden, context, ahead, types)
            _sow_all(self, types, found)
        return hidden, cache

    def head(self, x_bte: jax.Array) -> jax.Array:
        """Returns the logits [b, t, v] of hidden states [b, t, e]."""
        if self.config.logits_via_embedding:
            logits = self.token_embedder.attend(x_bte)
        else:
            logits = self.decoder.logits_dense(x_bte, ("activation_batch", "activation_length", "activation_vocab"))
        return finish_logits(self.config, logits)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns logits [b, t, v]. Takes the arguments of `hidden`."""
        return self.head(self.hidden(*args, **kwargs)[0])
