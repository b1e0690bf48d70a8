"""Keys of low-rank adapters, and their checks."""

import re
from collections.abc import Callable

from trainer.config.key_rows import Check, Inert, Place, Row
from trainer.config.keys import Config

# What an empty lora_module_path means: the matrices of the layers, without routers.
LAYERS = r"decoder/(?!logits_dense/)(?!.*gate/kernel$).*"
# The canonical names of an adapter's parameters: those of its product.
A, B = "lora_a", "lora_b"
ADAPTER = re.compile(r"(^|/)product/(\w+/)?lora_[ab]$")


def trained_patterns(config: Config) -> list[str]:
    """Returns regular expressions for the names of the trained parameters; [] if all are trained."""
    return [*([ADAPTER.pattern] if config.enable_lora else []), *config.trainable_parameters_mask]


def _numbers(config: Config) -> str | None:
    if config.enable_lora and not (config.lora_rank > 0 and config.lora_alpha > 0):
        return "both must be positive: the product of an adapter is scaled by lora_alpha / lora_rank"
    return None


def _pattern(config: Config) -> str | None:
    try:
        re.compile(config.lora_module_path)
    except re.error as error:
        return f"this is not a regular expression: {error}"
    return None


def _tile(config: Config) -> str | None:
    if config.lora_weight_qtype == "nf4" and config.lora_tile_size % 2:
        return "two inputs share a byte of nf4, so their number must be even"
    return None


def _adapters_twice(config: Config) -> str | None:
    if config.enable_lora and config.lora_restore_path and config.load_full_state_path:
        return "both give adapters; give only one of them"
    return None


def _stored_twice(config: Config) -> str | None:
    if config.enable_lora and config.lora_weight_qtype and config.quantization:
        return "both say how matrices are quantized; with checkpoint_is_quantized=true the checkpoint does"
    return None


def _moved(key: str, reason: str) -> tuple[tuple[str, ...], Callable[[Config], str | None]]:
    def problem(config: Config) -> str | None:
        return f"{reason}, and adapters leave the base as it is; leave out one of them" if _both(config, key) else None

    return ("enable_lora", key), problem


def _both(config: Config, key: str) -> bool:
    return bool(config.enable_lora and config[key])


ROWS = (Row(("lora_restore_path",), step=False, path=Place.ANY),)
CHECKS: tuple[Check, ...] = (
    (("enable_lora", "lora_rank", "lora_alpha"), _numbers),
    (("lora_module_path",), _pattern),
    (("lora_tile_size", "lora_weight_qtype"), _tile),
    (("lora_restore_path", "load_full_state_path"), _adapters_twice),
    (("enable_lora", "lora_weight_qtype", "quantization"), _stored_twice),
    _moved("weight_sparsity_n", "masks make weights zero"),
    _moved("use_qk_clip", "it scales queries and keys"),
    _moved("routed_bias_update_rate", "it moves the biases of routers"),
)
INERT = (
    Inert(
        ("lora_rank", "lora_alpha", "lora_module_path", "lora_restore_path", "lora_weight_qtype", "lora_tile_size"),
        lambda c: not c.enable_lora,
        "enable_lora=false",
    ),
    Inert(("lora_tile_size",), lambda c: not c.lora_weight_qtype, "nothing is quantized without lora_weight_qtype"),
    Inert(("lora_weight_qtype",), lambda c: c.checkpoint_is_quantized, "the checkpoint is quantized already"),
)
