"""Keys of quantization: recipes, quantized parts, and checks.

Quantization either applies in training, or defines how a checkpoint stores its weights ("stored weights").
"""

import math
from collections.abc import Sequence

from trainer.config.capabilities.expert_keys import has_experts
from trainer.config.key_rows import Check, Inert, refused, regexes
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.config.values import read_text

# Each recipe's dtype of activations and weights, and its dtype of gradients.
RECIPES = {
    "int8": ("int8", "int8"),
    "int4": ("int4", "int4"),
    "fp8": ("float8_e4m3fn", "float8_e4m3fn"),
    "fp8_e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "fp8_e5m2": ("float8_e5m2", "float8_e5m2"),
    "fp8_full": ("float8_e4m3fn", "float8_e5m2"),
    "fp8_gpu": ("float8_e4m3fn", "float8_e5m2"),
    "fp8_nanoo": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "nanoo_fp8": ("float8_e4m3fnuz", "float8_e5m2fnuz"),
}
# The dtype of stored weights for each value of `quantization`.
STORED_DTYPES = {
    "int8": "int8",
    "int4": "int4",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "nf4": "nf4",
}
# These recipes have one scale per operand, as the libraries of their platforms require; others have one per channel.
PER_TENSOR = ("fp8_gpu", "fp8_nanoo", "nanoo_fp8")
METHODS = (
    "weight_quantization_calibration_method",
    "act_quantization_calibration_method",
    "bwd_quantization_calibration_method",
    "drhs_grad_quantization_calibration_method",
    "logits_proj_quant_calibration_method",
)
MAY_BE_EMPTY = METHODS[3:]
WHICH = ("unquantized_modules", "quantize_router_proj", "quantize_logits_proj", "quantize_mtp")
# Together with `quantization`, these keys define how stored weights are quantized.
OF_STORED = (
    "checkpoint_is_quantized",
    "quantization",
    "weight_block_size",
    "weight_quantization_algorithm",
    METHODS[0],
    *WHICH,
)
KEYS = (*METHODS, "bwd_stochastic_rounding", *WHICH, "quantization_local_shard_count")


def asks_for_floats(words: Sequence[str]) -> bool:
    """Whether `words`, arguments of the form key=value, set checkpoint_is_quantized to false."""
    text = dict(word.partition("=")[::2] for word in words).get("checkpoint_is_quantized")
    try:
        return text is not None and not read_text(schema().keys["checkpoint_is_quantized"], text)
    except ValueError:
        return False  # `load` reports the error


def options_for_stored(config: Config, platform: str) -> dict[str, str]:
    """Returns the XLA options with which generation from stored weights is compiled for `platform`; {} except on CPUs.

    XLA's CPU backend converts each matrix to floats before a product. By default, the backend keeps all float matrices
    at once, in memory that is newly allocated at each step; a step then takes 3 to 7 times as long as with the returned
    option.
    """
    stored = config.checkpoint_is_quantized and platform == "cpu"
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if stored else {}


def is_integer(config: Config) -> bool:
    """Whether operands are quantized to integers."""
    return config.quantization in ("int8", "int4")


def shares_scales(config: Config) -> bool:
    """Whether the tokens of a batch share an activation scale that depends on their values."""
    own = config.logits_proj_quant_calibration_method if config.quantize_logits_proj else ""
    methods = {config.act_quantization_calibration_method, own or config.act_quantization_calibration_method}
    dynamic = any(not method.lower().startswith("fixed") for method in methods)
    return config.quantization in PER_TENSOR and not config.checkpoint_is_quantized and dynamic


def rounds(config: Config) -> bool:
    """Whether gradients are rounded stochastically."""
    return bool(config.quantization and config.bwd_stochastic_rounding and not config.checkpoint_is_quantized)


def _method(key: str) -> Check:
    def problem(config: Config) -> str | None:
        text = config[key]
        if not text and key in MAY_BE_EMPTY:
            return None
        name, *words = text.lower().split(",")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = [math.nan]
        if name == "minmax" and not config.checkpoint_is_quantized:
            return "an asymmetric range has a zero point, which the backward pass does not support; use absmax"
        if name == "minmax" and not is_integer(config):
            return f"only int8 and int4 have zero points, not quantization={config.quantization}"
        if name == "minmax" and key == METHODS[0]:
            return None if not words else "minmax has no number"
        fits = {
            "absmax": len(numbers) <= 1,
            "rms": len(numbers) == 1,
            "fixed": len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == -numbers[1]),
        }
        if not fits.get(name) or not all(0 < number < math.inf for number in numbers[-1:]):
            return "must be absmax or absmax,FACTOR or rms,FACTOR or fixed,BOUND with a positive number"
        return None

    return (key,), problem


def _stored(config: Config) -> str | None:
    if not config.checkpoint_is_quantized:
        return "nf4 is for stored weights; give checkpoint_is_quantized=true" if config.quantization == "nf4" else None
    if config[METHODS[0]].lower().startswith("fixed"):
        return f"{METHODS[0]}={config[METHODS[0]]} has one scale for all layers; stored weights need one per layer"
    if config.quantization not in STORED_DTYPES:
        return f"quantization must specify how the weights are stored: {', '.join(STORED_DTYPES)}"
    return None


def _block(config: Config) -> str | None:
    sizes = config.weight_block_size
    if sizes is not None and (len(sizes) != 2 or min(sizes) < 1):
        return "must be [inputs, outputs], two numbers of at least 1, as in [32,1]; or null"
    if sizes and config.checkpoint_is_quantized and config.quantization == "nf4" and sizes[0] % 2:
        return "two inputs share a byte of nf4, so a block needs an even number of inputs"
    return None


def _algorithm(config: Config) -> str | None:
    if config.weight_quantization_algorithm == "gptq" and config.quantization == "nf4":
        return "GPTQ requires evenly spaced numbers, and nf4 has others; use rounding or awq"
    if config.weight_quantization_algorithm == "gptq" and config[METHODS[0]].lower() == "minmax":
        return "Qwix's GPTQ does not support the zero points of minmax; use absmax, or awq"
    if (
        config.weight_quantization_algorithm != "rounding"
        and config.weight_block_size
        and config.weight_block_size[1] != 1
    ):
        return "AWQ and GPTQ need separate scales for each output; give [inputs,1]"
    return None


CHECKS: tuple[Check, ...] = (
    regexes("unquantized_modules"),
    *map(_method, METHODS),
    (("checkpoint_is_quantized", "quantization", METHODS[0]), _stored),
    refused(
        ("checkpoint_is_quantized", "quantize_logits_proj", "logits_via_embedding"),
        lambda c: c.checkpoint_is_quantized and c.quantize_logits_proj and c.logits_via_embedding,
        "a tied head is also the table in which tokens are looked up, which is not quantized",
    ),
    (("weight_block_size", "checkpoint_is_quantized", "quantization"), _block),
    (("weight_quantization_algorithm", "quantization", "weight_block_size", METHODS[0]), _algorithm),
    refused(
        ("quantize_mtp", "mtp_num_layers"),
        lambda c: c.quantize_mtp and not c.mtp_num_layers,
        "there are no modules of multi-token prediction; set mtp_num_layers",
    ),
    refused(
        ("quantization", "bwd_stochastic_rounding"),
        lambda c: c.bwd_stochastic_rounding and c.quantization and not is_integer(c),
        "Qwix rounds fp8 to the nearest number; only int8 and int4 can be rounded stochastically",
    ),
    refused(
        ("quantization", "bwd_stochastic_rounding", "quantize_logits_proj"),
        lambda c: rounds(c) and c.quantize_logits_proj,
        "the output head has no random key, so its gradients cannot be rounded stochastically",
    ),
)
INERT = (
    Inert(KEYS, lambda c: not c.quantization, "nothing is quantized"),
    Inert(
        (*METHODS[1:], "bwd_stochastic_rounding", "quantization_local_shard_count"),
        lambda c: c.checkpoint_is_quantized,
        "only stored weights are quantized",
    ),
    Inert(
        ("weight_block_size", "weight_quantization_algorithm"),
        lambda c: not c.checkpoint_is_quantized,
        "checkpoint_is_quantized=false",
    ),
    Inert((METHODS[4],), lambda c: not c.quantize_logits_proj, "quantize_logits_proj=false"),
    Inert(("quantize_router_proj",), lambda c: not has_experts(c), "num_experts=1"),
)
