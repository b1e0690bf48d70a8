"""Keys of low-rank adapters, and their checks."""

import re
from collections.abc import Callable

from trainer.config.capabilities.quantization_keys import STORED
from trainer.config.keys import Config

ENABLE, RANK, ALPHA, PATTERN = "enable_lora", "lora_rank", "lora_alpha", "lora_module_path"
RESTORE, QTYPE, TILE = "lora_restore_path", "lora_weight_qtype", "lora_tile_size"
MASK = "trainable_parameters_mask"
# What an empty lora_module_path means: the matrices of the layers, without routers.
LAYERS = r"decoder/(?!logits_dense/)(?!.*gate/kernel$).*"
# The canonical names of an adapter's parameters: those of its product.
A, B = "lora_a", "lora_b"
ADAPTER = re.compile(r"(^|/)product/(\w+/)?lora_[ab]$")


def trained_patterns(config: Config) -> list[str]:
    """Returns regular expressions for the names of the trained parameters; [] if all are trained."""
    return [*([ADAPTER.pattern] if config.enable_lora else []), *config.trainable_parameters_mask]


def _numbers(config: Config) -> str | None:
    if config[ENABLE] and not (config[RANK] > 0 and config[ALPHA] > 0):
        return "both must be positive: the product of an adapter is scaled by lora_alpha / lora_rank"
    return None


def _pattern(config: Config) -> str | None:
    try:
        re.compile(config[PATTERN])
    except re.error as error:
        return f"this is not a regular expression: {error}"
    return None


def _tile(config: Config) -> str | None:
    if config[QTYPE] == "nf4" and config[TILE] % 2:
        return "two inputs share a byte of nf4, so their number must be even"
    return None


def _adapters_twice(config: Config) -> str | None:
    if config[ENABLE] and config[RESTORE] and config.load_full_state_path:
        return "both give adapters; give only one of them"
    return None


def _stored_twice(config: Config) -> str | None:
    if config[ENABLE] and config[QTYPE] and config.quantization:
        return "both say how matrices are quantized; with checkpoint_is_quantized=true the checkpoint does"
    return None


def _moved(key: str, reason: str) -> tuple[tuple[str, ...], Callable[[Config], str | None]]:
    def problem(config: Config) -> str | None:
        return f"{reason}, and adapters leave the base as it is; leave out one of them" if _both(config, key) else None

    return (ENABLE, key), problem


def _both(config: Config, key: str) -> bool:
    return bool(config[ENABLE] and config[key])


LORA_CHECKS = (
    ((ENABLE, RANK, ALPHA), _numbers),
    ((PATTERN,), _pattern),
    ((TILE, QTYPE), _tile),
    ((RESTORE, "load_full_state_path"), _adapters_twice),
    ((ENABLE, QTYPE, "quantization"), _stored_twice),
    _moved("weight_sparsity_n", "masks make weights zero"),
    _moved("use_qk_clip", "it scales queries and keys"),
    _moved("routed_bias_update_rate", "it moves the biases of routers"),
)
LORA_INERT = (
    ((RANK, ALPHA, PATTERN, RESTORE, QTYPE, TILE), lambda c: not c[ENABLE], "enable_lora=false"),
    ((TILE,), lambda c: not c[QTYPE], "nothing is quantized without lora_weight_qtype"),
    ((QTYPE,), lambda c: c[STORED], "the checkpoint is quantized already"),
)
