"""Keys of low-rank adapters, and their checks."""

import re

from trainer.config.key_rows import Check, Inert, Place, Row, refused
from trainer.config.keys import Config

# An empty lora_module_path means all matrices of the layers except routers.
LAYERS = r"decoder/(?!logits_dense/)(?!.*gate/kernel$).*"
# The last part of the canonical names of an adapter's parameters.
A, B = "lora_a", "lora_b"
ADAPTER = re.compile(r"(^|/)product/(\w+/)?lora_[ab]$")


def trained_patterns(config: Config) -> list[str]:
    """Returns regular expressions for the names of the trained parameters; [] if all are trained."""
    return [*([ADAPTER.pattern] if config.enable_lora else []), *config.trainable_parameters_mask]


def _pattern(config: Config) -> str | None:
    try:
        re.compile(config.lora_module_path)
    except re.error as error:
        return f"this is not a regular expression: {error}"
    return None


def _moved(key: str, reason: str) -> Check:
    why = f"{reason}, but adapters leave the base model unchanged; leave out one of them"
    return refused(("enable_lora", key), lambda c: c.enable_lora and c[key], why)


ROWS = (Row(("lora_restore_path",), step=False, path=Place.ANY),)
CHECKS: tuple[Check, ...] = (
    refused(
        ("enable_lora", "lora_rank", "lora_alpha"),
        lambda c: c.enable_lora and not (c.lora_rank > 0 and c.lora_alpha > 0),
        "both must be positive: the product of an adapter is scaled by lora_alpha / lora_rank",
    ),
    (("lora_module_path",), _pattern),
    refused(
        ("lora_tile_size", "lora_weight_qtype"),
        lambda c: c.lora_weight_qtype == "nf4" and c.lora_tile_size % 2,
        "two inputs share a byte of nf4, so lora_tile_size must be even",
    ),
    refused(
        ("lora_restore_path", "load_full_state_path"),
        lambda c: c.enable_lora and c.lora_restore_path and c.load_full_state_path,
        "both load adapters; give only one of them",
    ),
    refused(
        ("enable_lora", "lora_weight_qtype", "quantization"),
        lambda c: c.enable_lora and c.lora_weight_qtype and c.quantization,
        "both quantize matrices; leave out lora_weight_qtype if the checkpoint is quantized, otherwise quantization",
    ),
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
