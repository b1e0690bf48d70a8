"""Blocks whose feed-forward layer is a mixture of experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import nnx

from trainer.config.capabilities.expert_keys import has_bias, scores_by_sigmoid
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.dense import Dense
from trainer.layers.mlp import MLP
from trainer.layers.moe import GatedSharedMoE, MoE, SharedMoE
from trainer.layers.stack import MakeBlock, Stack
from trainer.models.huggingface import EXPERT, Layout
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS
from trainer.ops.routing import Score
from trainer.products.context import Context


class ExpertBlock(llama2.Block):
    """Llama's block with a mixture of experts in place of its MLP. Subclasses set the layer's name and the score.

    Dropout is as in Llama's block, but the experts' hidden units have no dropout.
    """

    NAME: ClassVar[str]  # MaxText's name for the layer, and thus the prefix of its parameters
    WEIGHS_INPUTS: ClassVar[bool] = False  # see `MoE`

    @staticmethod
    def score(config: Config) -> Score:
        """Returns the function that chooses each token's experts."""
        raise NotImplementedError

    def add_feed_forward(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any]) -> None:
        setattr(self, self.NAME, self.make_experts(config, rngs, dtypes))

    def make_experts(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        """Makes the mixture of experts, which is called as `layer(x, context)`.

        `given`: arguments of `MoE` that `config` does not determine.

        Raises:
          UserError: the width of an expert is missing. A family whose `Facts` require the width reports this earlier.
        """
        if config.base_moe_mlp_dim == -1:
            raise UserError("base_moe_mlp_dim=-1: the hidden width of an expert is missing")
        return MoE(
            config.base_emb_dim,
            config.base_moe_mlp_dim,
            config.mlp_activations,
            experts=config.num_experts,
            chosen=config.num_experts_per_tok,
            score=self.score(config),
            sparse=config.sparse_matmul,
            capacity_factor=config.capacity_factor,
            buffer=config.ragged_buffer_factor,
            routed_bias=has_bias(config),
            by_sigmoid=scores_by_sigmoid(config),
            weighs_inputs=self.WEIGHS_INPUTS,
            rngs=rngs,
            **dtypes,
            **given,
        )

    def feed_forward(self, x_bte: jax.Array, context: Context) -> jax.Array:
        return getattr(self, self.NAME)(x_bte, context)


class SharedExpertBlock(ExpertBlock):
    """An `ExpertBlock` with `config.shared_experts` additional experts, which process every token."""

    GATED: ClassVar[bool] = False  # see `GatedSharedMoE`

    def make_experts(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        routed = super().make_experts(config, rngs, dtypes, **given)
        hidden = config.shared_experts * config.base_moe_mlp_dim
        activations = config.mlp_activations
        shared = MLP(config.base_emb_dim, hidden, activations, dropout_rate=0.0, rngs=rngs, **dtypes)
        if not self.GATED:
            return SharedMoE(routed, shared)
        gate = Dense([config.base_emb_dim], [1], ("embed", None), rngs=rngs, **dtypes)
        return GatedSharedMoE(routed, shared, gate)


def stack_of(config: Config, name: str, dense: MakeBlock, sparse: MakeBlock, layers: int) -> Stack:
    """Returns a stack of `layers` layers, named `name`.

    Every `interleave_moe_layer_step`-th block is `sparse`, and the others are `dense`.
    """
    step = config.interleave_moe_layer_step
    return Stack(name, (dense,) * (step - 1) + (sparse,), layers // step)


def layouts(name: str, router: str, gate: str, up: str, down: str) -> dict[str, Layout]:
    """Returns Llama's layouts and the layouts of the experts in the layer `name`.

    Args:
      router, gate, up, down: the tensors' names within a Hugging Face layer. All names but the router's
        contain `models.huggingface.EXPERT`.
    """
    own, there = f"decoder/layers/{name}", "model.layers.{}."
    return LAYOUTS | {
        f"{own}/gate/kernel": Layout(there + router, inputs=1),
        f"{own}/wi_0": Layout(there + gate, inputs=1),
        f"{own}/wi_1": Layout(there + up, inputs=1),
        f"{own}/wo": Layout(there + down, inputs=1),
    }


def layouts_in_gguf(own: str, end: str = "", file: str = "weight") -> dict[str, Layout]:
    """Returns the GGUF layouts of the expert matrices in the layer `own`, by canonical name.

    Each of gate, up and down is one stacked tensor for all experts. `end` is the suffix of our names, and `file` is the
    suffix of the tensors' names.
    """
    each, names = f"model.layers.{{}}.mlp.experts.{EXPERT}.", {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    return {f"{own}/{name}{end}": Layout(f"{each}{it}_proj.{file}", inputs=int(not end)) for name, it in names.items()}
