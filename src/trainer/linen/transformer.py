"""The transformer in Linen, with the structure and names of `models.transformer`."""

import jax.numpy as jnp
from flax import linen

from trainer.config.keys import Config
from trainer.layers.sown import Activation
from trainer.linen.bridge import to_linen
from trainer.linen.mtp import MtpBlock
from trainer.linen.stack import Stacks
from trainer.models import transformer
from trainer.models.mtp import Ahead, embedded
from trainer.models.norms import make_norm
from trainer.models.transformer import Types, finish_logits, first_input, learned_positions, outer_dropout
from trainer.products.context import Context


class Decoder(Stacks):
    """See `models.transformer.Decoder`."""

    def setup(self):
        if learned_positions(self.config):
            self.position_embedder = to_linen(transformer.make_position_embedder, self.config)
        self.decoder_norm = to_linen(make_norm, self.config)
        if not self.config.logits_via_embedding:
            self.logits_dense = to_linen(transformer.make_logits_dense, self.config)

    def __call__(self, x, cache, context: Context, types: Types = ()):
        x = first_input(self.config, x, lambda: self.position_embedder, context)
        x, cache, sown = self.run_layers(x, cache, context, types)
        _sow_all(self, types, sown)
        return outer_dropout(self.config, self.decoder_norm(x), context, transformer.BEFORE_HEAD), cache

    def head(self, x):
        """Returns the logits of hidden states `x` from an output head that is not tied to the embedding."""
        return self.logits_dense(x, ("activation_batch", "activation_length", "activation_vocab"))


class Transformer(linen.Module):
    """A decoder-only language model."""

    config: Config

    def setup(self):
        self.token_embedder = to_linen(transformer.make_embedder, self.config)
        self.decoder = Decoder(self.config)
        if self.config.mtp_num_layers:
            self.mtp_block = MtpBlock(self.config)

    def hidden(
        self, inputs, position, segment, row, cache=None, key=None, types=(), sampled=None, ranks=None, ahead=None
    ):
        if self.is_initializing() and self.config.mtp_num_layers:
            ahead = Ahead(*(jnp.zeros((*inputs.shape, self.config.mtp_num_layers), jnp.int32),) * 2)
        x, further = embedded(self.token_embedder, inputs, ahead)
        if Activation in types:
            _sow(self, Activation, "embedding", x)
        context = transformer.make_context(self.config, cache, position, segment, row, key, sampled, ranks)
        hidden, cache = self.decoder(x, cache, context, types)
        if ahead is not None:
            _sow_all(self, types, self.mtp_block(further, hidden, context, ahead, types))
        return hidden, cache

    def head(self, x):
        tied = self.config.logits_via_embedding
        return finish_logits(self.config, self.token_embedder(x, nnx_method="attend") if tied else self.decoder.head(x))

    def __call__(self, *args, **kwargs):
        """Returns logits. Takes the arguments of `hidden`."""
        return self.head(self.hidden(*args, **kwargs)[0])


def _sow_all(module, types, sown):
    for variable_type in types:
        for path, value in sown[variable_type.__name__].items():
            _sow(module, variable_type, path, value)


def _sow(module, variable_type, name, value):
    module.sow(variable_type.__name__, name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
