"""The properties of Mistral 4 that the configuration stage needs (`config.family.Facts`). They combine
DeepSeek's and Ministral 3's."""

from trainer.config.family import LATENT, Facts
from trainer.models.deepseek import facts as deepseek
from trainer.models.ministral3 import facts as ministral3

_EXPERTS = ("num_experts", "norm_topk_prob", "first_num_dense_layers", "shared_experts", "routed_scaling_factor")
_GROUPS = ("n_routing_groups", "topk_routing_group")
FACTS = Facts(
    "trainer.models.mistral4.family:FAMILY",
    reads=(*_EXPERTS, *_GROUPS, *LATENT, *ministral3.FACTS.reads),
    checks=(*deepseek.FACTS.checks, *ministral3.FACTS.checks),
)
