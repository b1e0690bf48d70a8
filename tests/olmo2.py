"""A family like OLMo 2 (Ai2 2024, arXiv:2501.00656), as a user can write it.

It has norms over all heads of the queries and of the keys, and norms after attention and MLP instead of before them.
Hugging Face stores the scales of the query and key norms with one axis.
"""

import functools

import jax.numpy as jnp

from trainer.layers.attention import Attention
from trainer.layers.norm import RMSNorm
from trainer.layers.param import param
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2.block import Block, make_rope
from trainer.models.llama2.family import LAYOUTS

ATTENTION = "decoder/layers/self_attention/"


class NormedAttention(Attention):
    """Attention with one norm over all of a token's queries, and one over all of its keys."""

    def __init__(self, config, rngs, dtypes, *, merged):
        heads, kv_heads, size = config.base_num_query_heads, config.base_num_kv_heads, config.head_dim
        super().__init__(
            config.base_emb_dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            rope=make_rope(config),
            rngs=rngs,
            **dtypes,
        )
        for name, count in (("query_norm", heads), ("key_norm", kv_heads)):
            norm = RMSNorm(count * size, epsilon=config.normalization_layer_epsilon, **dtypes)
            shape, names = ((count * size,), ("merged",)) if merged else ((count, size), ("merged", None))
            norm.scale = param(jnp.ones(shape, dtypes["weight_dtype"]), names)
            setattr(self, name, norm)

    def projected(self, x_bte, context):
        queries, keys, values = super().projected(x_bte, context)
        return self._normed(queries, self.query_norm), self._normed(keys, self.key_norm), values

    def _normed(self, x_bthd, norm):
        x = x_bthd.astype(jnp.float32)
        x = x / jnp.sqrt(jnp.mean(x * x, axis=(-2, -1), keepdims=True) + norm.epsilon)
        return (x * norm.scale[...].reshape(x.shape[-2:])).astype(x_bthd.dtype)


class Olmo2Block(Block):
    """Computes x + norm(attention(x)), then x + norm(mlp(x)). `merged`: whether the scales of the query and key norms
    have one axis instead of [heads, head_dim]."""

    def __init__(self, config, rngs, *, merged):
        self.merged = merged
        super().__init__(config, rngs)
        del self.pre_self_attention_layer_norm, self.post_self_attention_layer_norm
        dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        norm = functools.partial(RMSNorm, config.base_emb_dim, epsilon=config.normalization_layer_epsilon, **dtypes)
        self.attention_norm, self.mlp_norm = norm(), norm()

    def make_attention(self, config, rngs, dtypes):
        return NormedAttention(config, rngs, dtypes, merged=self.merged)

    def __call__(self, x, cache, context):
        h, cache = self.self_attention(x, cache, context)
        x = x + self.attention_norm(h)
        return x + self.mlp_norm(self.feed_forward(x, context)), cache


def family(merged):
    layouts = {name: layout for name, layout in LAYOUTS.items() if "_attention_layer_norm" not in name}
    layer = "model.layers.{}."
    layouts |= {
        "decoder/layers/attention_norm/scale": Layout(layer + "post_attention_layernorm.weight"),
        "decoder/layers/mlp_norm/scale": Layout(layer + "post_feedforward_layernorm.weight"),
        f"{ATTENTION}query_norm/scale": Layout(layer + "self_attn.q_norm.weight", rotated="head_dim", flat=True),
        f"{ATTENTION}key_norm/scale": Layout(layer + "self_attn.k_norm.weight", rotated="head_dim", flat=True),
    }
    block = functools.partial(Olmo2Block, merged=merged)
    return Family(
        lambda config: [Stack("layers", (block,), config.base_num_decoder_layers)],
        axes={"merged": ("fsdp", "tensor")},
        hugging_face=[HuggingFace("olmo2", "Olmo2ForCausalLM", layouts, defaults={})],
        maxtext=MaxText(),
    )


MERGED, BY_HEAD = family(True), family(False)
