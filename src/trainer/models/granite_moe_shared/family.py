"""Granite 3 with routed experts and a shared MLP that processes every token (`granitemoeshared`). The key
`shared_experts` is the width of the shared MLP divided by an expert's width."""

from collections.abc import Mapping
from typing import Any

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.experts import SharedExpertBlock, layouts_in_gguf, stack_of
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.granite4.family import GATE_UP
from trainer.models.granite4.family import SHARED as THEIR_MLP
from trainer.models.granite_moe import family as granite_moe
from trainer.models.llama2.block import Block as DenseBlock
from trainer.models.llama2.family import LAYOUTS

NAME, _SIZE = granite_moe.NAME, "shared_intermediate_size"
_LAYER = "decoder/layers/"


class Block(SharedExpertBlock):
    """Granite's block with routed and shared experts."""

    NAME, score = NAME, staticmethod(granite_moe.Block.score)


def stacks(config: Config) -> list[Stack]:
    """Returns one stack."""
    return [stack_of(config, "layers", DenseBlock, Block, config.base_num_decoder_layers)]


def _read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    width, each = said[_SIZE], said["intermediate_size"]
    if width < 1 or width % each:
        refused.append(f"{_SIZE}={width} (known: multiples of intermediate_size={each})")
    return {"shared_experts": max(width // each, 1)}


def _write(config: Config) -> dict[str, Any]:
    return {_SIZE: config.shared_experts * config.base_moe_mlp_dim}


(_OF_GRANITE,) = granite_moe.FAMILY.hugging_face
assert _OF_GRANITE.gguf
_LAYOUTS = {
    **{
        name.replace(f"/{NAME}/", f"/{NAME}/MoeBlock_0/"): layout
        for name, layout in _OF_GRANITE.layouts.items()
        if not name.startswith(f"{_LAYER}mlp/")
    },
    **{name.replace("/mlp/", f"/{NAME}/shared_experts/"): layout for name, layout in THEIR_MLP.items()},
}
_IN_GGUF = layouts_in_gguf(f"{_LAYER}{NAME}/MoeBlock_0") | {
    name.replace("/mlp/", f"/{NAME}/shared_experts/"): it._replace(name=it.name.replace("mlp", "mlp.shared_experts"))
    for name, it in LAYOUTS.items()
    if "/mlp/" in name
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        _OF_GRANITE._replace(
            model_type="granitemoeshared",
            architecture="GraniteMoeSharedForCausalLM",
            layouts=_LAYOUTS,
            defaults={**_OF_GRANITE.defaults, _SIZE: 0},
            merged=(*_OF_GRANITE.merged, GATE_UP),
            fields=(_SIZE,),
            read=_read,
            write=_write,
            gguf=_OF_GRANITE.gguf._replace(
                when=lambda said: bool(said(granite_moe.SHARED)),
                sizes={**_OF_GRANITE.gguf.sizes, granite_moe.SHARED: _SIZE},
                layouts=_IN_GGUF,
            ),
        )
    ],
)
