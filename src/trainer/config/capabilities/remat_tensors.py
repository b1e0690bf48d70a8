"""The tensors of a block that a rematerialization policy can keep.

Layers tag each of these tensors with a name that is also a key of base.yml. With remat_policy=custom, the value of this
key specifies what to do with the tensor.
"""

from trainer.config.capabilities.expert_keys import has_experts, only_experts, sends
from trainer.config.errors import shortened
from trainer.config.key_rows import Check, Inert
from trainer.config.keys import Config

QKV = ("query_proj", "key_proj", "value_proj")
ATTENTION = (*QKV, "out_proj")
# PROJECTIONS has the results of all matrix products with weights. "context" is the result of attention before
# its output projection.
OF_MLP = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")
OF_EXPERTS = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")
PROJECTIONS = (*ATTENTION, *OF_MLP, *OF_EXPERTS)
QUANTIZED = "quantization"  # MaxText's name for the quantized operands of products
LAYER_INPUT = "decoder_layer_input"
TENSORS = (LAYER_INPUT, "context", *PROJECTIONS)
# For each key that lists a family's additional tensors: what remat_policy=custom does with these tensors.
OWN_TENSORS = {"custom_device_tensors": "device", "custom_offload_tensors": "offload"}


def _custom_tensors(config: Config) -> str | None:
    twice = [name for name in config.custom_device_tensors if name in config.custom_offload_tensors]
    return f"{shortened(twice[0])} is in both lists; keep it in one of them" if twice else None


CHECKS: tuple[Check, ...] = ((("custom_device_tensors", "custom_offload_tensors"), _custom_tensors),)
INERT = (
    Inert((*TENSORS, *OWN_TENSORS), lambda c: c.remat_policy != "custom", "remat_policy is not custom"),
    Inert(OF_MLP, only_experts, "every layer of this family has experts, whose tensors are moe_mlp*"),
    Inert(OF_EXPERTS, lambda c: not has_experts(c), "num_experts=1"),
    Inert(OF_EXPERTS, sends, "with expert parallelism, the backward pass computes these tensors again"),
    Inert(
        ("mlpwi",),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 2,
        "mlp_activations has two entries, whose projections are mlpwi_0 and mlpwi_1",
    ),
    Inert(
        ("mlpwi_0", "mlpwi_1"),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 1,
        "mlp_activations has one entry, whose projection is mlpwi",
    ),
    Inert(
        ("mlpwo",),
        lambda c: c.remat_policy == "custom" and c.mlpwo != "remat",
        "the backward pass does not read it, so it is neither saved nor recomputed",
    ),
)
