"""GLM 4.5, 4.6 and 4.7 (GLM team 2025, arXiv:2508.06471): Qwen2's attention and DeepSeek-V3's experts. RoPE
rotates only the first half of each head, in which it pairs entry i with entry i + head_dim / 4. The large models also
normalize queries and keys (`use_qk_norm`)."""

import functools
from collections.abc import Mapping
from typing import Any

from trainer.models.deepseek import family as deepseek
from trainer.models.deepseek.block import Experts
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import SIZES, Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2.family import LAYOUTS
from trainer.models.phi3.family import no_tokens
from trainer.models.qwen2 import family as qwen2
from trainer.models.qwen3.family import NORMS


class Block(qwen2.Block, Experts):
    """Qwen2's block with experts in place of the MLP."""


_EACH = "decoder/layers/"
_BLOCK = {
    name.removeprefix(_EACH): layout
    for name, layout in (LAYOUTS | qwen2.BIASES | NORMS).items()
    if name.startswith(_EACH) and "/mlp/" not in name
}
# The defaults of fields that config.json may omit.
EXPERTS = {
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1},
    **{"rms_norm_eps": 1e-5},
}
_MODULES = "nextn_predict_layers"  # a GGUF key; GGUF counts multi-token prediction modules as layers


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    modules = said.get(_MODULES, 0)
    return {
        "num_hidden_layers": said.get("num_hidden_layers", 0) - modules,
        **{"num_nextn_predict_layers": modules, "norm_topk_prob": said.get(deepseek.NORM, False)},
        "first_k_dense_replace": said.get("first_k_dense_replace", 0),
    }


def _gguf_values(data: Mapping[str, Any]) -> dict[str, Any]:
    modules = data["num_nextn_predict_layers"]
    return {
        **{"block_count": data["num_hidden_layers"] + modules, _MODULES: modules},
        **{deepseek.SCORE: deepseek.SIGMOID_THERE, deepseek.NORM: data["norm_topk_prob"]},
    }


FAMILY = Family(
    functools.partial(deepseek.stacks, dense=qwen2.Block, sparse=Block),
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            deepseek.layouts(_BLOCK),
            defaults=EXPERTS
            | {"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "routed_scaling_factor": 1.0}
            | {"attention_bias": False, "use_qk_norm": False, "num_nextn_predict_layers": 1},
            partial=True,
            sizes=deepseek.OF_EXPERTS | {"attention_bias": "attention_bias", "use_qk_norm": "use_qk_norm"},
            implies=deepseek.BY_SIGMOID,
            methods=("noaux_tc", "noaux_tc"),
            write=no_tokens,
            gguf=Gguf(
                "glm4moe",
                when=lambda said: said(deepseek.SCORE) in (None, deepseek.SIGMOID_THERE),
                sizes={**SIZES, **deepseek.SIZES_OF_EXPERTS},
                numbers=deepseek.NUMBERS_OF_EXPERTS,
                more={_MODULES: int, deepseek.SCORE: int, deepseek.NORM: bool},
                fields=_fields,
                write=_gguf_values,
            ),
        )
    ],
)
