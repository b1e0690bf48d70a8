"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407), the example of docs/guides/extending.md.

Norms follow attention and MLP instead of preceding them, and each head's queries and keys have a norm. Three layers
with a sliding window and RoPE alternate with one layer without either. A model without windows has RoPE in every layer.
"""

import functools

from trainer.config.capabilities.windows import windows
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS
from trainer.models.patterns import repeated
from trainer.models.qwen3.family import NORMS


class Block(llama2.Block):
    """Computes x + norm(attention(x)), then x + norm(mlp(x)), then dropout."""

    def __init__(self, config, rngs, *, window, rotates):
        self.rotates = rotates
        super().__init__(config, rngs, window)

    def add_norms(self, config, norm):
        self.post_self_attention_layer_norm, self.post_mlp_layer_norm = norm(), norm()

    def make_attention(self, config, rngs, dtypes, **given):
        given |= {} if self.rotates else {"rope": None}
        return super().make_attention(config, rngs, dtypes, **given)

    def attention_input(self, x):
        return x

    def attention_output(self, h):
        return self.post_self_attention_layer_norm(h)

    def feed_forward_input(self, x):
        return x

    def feed_forward_output(self, h):
        return self.post_mlp_layer_norm(h)


def stacks(config):
    """Returns two stacks of layers: the complete repetitions of the pattern of blocks, and the remaining layers."""
    pattern = windows(config)
    blocks = [functools.partial(Block, window=window, rotates=bool(window) or len(pattern) == 1) for window in pattern]
    return repeated(blocks, config.base_num_decoder_layers)


LAYER = "model.layers.{}."
OWN = {
    "decoder/layers/post_self_attention_layer_norm/scale": Layout(LAYER + "post_attention_layernorm.weight"),
    "decoder/layers/post_mlp_layer_norm/scale": Layout(LAYER + "post_feedforward_layernorm.weight"),
}


def _read(said, refused):
    """Refuses a window size if no layer has a window.

    With such a configuration, transformers uses RoPE in no layer, but `stacks` uses it in every layer.
    """
    if said["sliding_window"] and set(said.get("layer_types") or ()) == {"full_attention"}:
        refused.append(f"sliding_window={said['sliding_window']} without a layer of kind sliding_attention")
    return {}


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "exaone4",
            "Exaone4ForCausalLM",
            {name: layout for name, layout in LAYOUTS.items() if "layer_norm" not in name} | NORMS | OWN,
            defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
            qk_norm=True,
            window="alternating",
            period=4,
            period_field="sliding_window_pattern",
            read=_read,
        )
    ],
)
