"""Which products of a model are quantized, and how, according to the quantization keys."""

import functools
import re
from collections.abc import Sequence

from trainer.config.capabilities.quantization_keys import (
    PER_TENSOR,
    RECIPES,
    STORED_DTYPES,
)
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.ops.paths import listed, whole_name
from trainer.products.dequantized import Storage, dequantized
from trainer.products.plain import MakeProduct, Rules, make_plain
from trainer.products.quantized import Calibration, Recipe, quantized

ROUTER, HEAD, MTP = (
    r"(^|/)(shared_expert_)?gate/kernel$",
    r"^(decoder/logits_dense/kernel|token_embedder/embedding)$",
    "^mtp_block/",
)


def quantization_rules(config: Config) -> Rules:
    """Returns the product rules for the matrices of a model; () if nothing is quantized."""
    if not config.quantization:
        return ()
    layers, head = _makers(config)
    kept = [named(pattern) for pattern in config.unquantized_modules]
    kept += [] if config.quantize_router_proj else [ROUTER]
    kept += [] if config.quantize_mtp else [MTP]
    kept += [] if config.quantize_logits_proj else [HEAD]
    return [*((pattern, make_plain) for pattern in kept), (HEAD, head), ("", layers)]


def _makers(config: Config) -> tuple[MakeProduct, MakeProduct]:
    """Returns the functions that make the products of the layers and of the output head."""
    if config.checkpoint_is_quantized:
        make = functools.partial(dequantized, storage_of(config))
        return make, make
    layers, head = _recipes(config)
    return functools.partial(quantized, layers), functools.partial(quantized, head)


def storage_of(config: Config) -> Storage:
    """Returns how quantized weights are stored."""
    inputs, outputs = config.weight_block_size or (0, 1)
    method, algorithm = config.weight_quantization_calibration_method.lower(), config.weight_quantization_algorithm
    return Storage(STORED_DTYPES[config.quantization], (inputs, outputs), method, algorithm == "awq")


def _recipes(config: Config) -> tuple[Recipe, Recipe]:
    """Returns the quantization recipes of the layers and of the output head."""
    name, backward = config.quantization, config.bwd_quantization_calibration_method
    of_weight = config.drhs_grad_quantization_calibration_method or backward
    methods = config.act_quantization_calibration_method, config.weight_quantization_calibration_method
    own = config.logits_proj_quant_calibration_method
    of_head = (own, own) if own else methods
    of_layers, in_head = (
        Calibration(*(method.lower() for method in (*both, backward, of_weight))) for both in (methods, of_head)
    )
    parts = config.quantization_local_shard_count
    layers = Recipe(*RECIPES[name], of_layers, name not in PER_TENSOR, config.bwd_stochastic_rounding, parts)
    return layers, Recipe(
        *RECIPES[name], in_head, layers.per_channel, parts=parts if config.num_vocab_tiling == 1 else 1
    )


def is_quantized(make: MakeProduct | None) -> bool:
    """Returns whether `make`, the function that a rule selects, makes quantized products."""
    return isinstance(make, functools.partial) and make.func in (quantized, dequantized)


def named(pattern: str) -> str:
    """Returns a regular expression for names in which `pattern`, such as mlp/wo, matches complete components."""
    return f"(^|/)(?:{pattern})(/|$)"


def check_unquantized(config: Config, names: Sequence[str]) -> None:
    """Refuses patterns of unquantized_modules that match no matrix. `names`: the canonical names of all matrices.

    Raises:
      UserError: a pattern matches no matrix. The message lists all such patterns.
    """
    patterns = config.unquantized_modules if config.quantization else ()
    whole = [*map(whole_name, names)]
    if unused := [pattern for pattern in patterns if not any(re.search(named(pattern), name) for name in whole)]:
        raise UserError(
            f"unquantized_modules: {', '.join(unused)} matches no matrix; the matrices are: {listed(names)}"
        )
