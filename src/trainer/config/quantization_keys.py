"""Keys of quantized training: the recipes, what is quantized, and their checks."""

import math
from collections.abc import Callable

from trainer.config.expert_keys import has_experts
from trainer.config.keys import Config

# The dtypes of each recipe: of activations and weights, and of gradients.
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
# These have one scale for each operand, as the libraries of their platforms multiply; the others one for each channel.
PER_TENSOR = ("fp8_gpu", "fp8_nanoo", "nanoo_fp8")
METHODS = (
    "weight_quantization_calibration_method",
    "act_quantization_calibration_method",
    "bwd_quantization_calibration_method",
    "drhs_grad_quantization_calibration_method",
    "logits_proj_quant_calibration_method",
)
MAY_BE_EMPTY = METHODS[3:]
ROUNDING, UNQUANTIZED = "bwd_stochastic_rounding", "unquantized_modules"
KEYS = (
    *METHODS,
    ROUNDING,
    UNQUANTIZED,
    *("quantize_router_proj", "quantize_logits_proj", "quantize_mtp", "quantization_local_shard_count"),
)


def is_integer(config: Config) -> bool:
    """Whether operands are quantized to integers."""
    return config.quantization in ("int8", "int4")


def rounds(config: Config) -> bool:
    """Whether gradients are rounded stochastically."""
    return bool(config.quantization and config[ROUNDING])


def _method(key: str) -> tuple[tuple[str, ...], Callable[[Config], str | None]]:
    def problem(config: Config) -> str | None:
        text = config[key]
        if not text and key in MAY_BE_EMPTY:
            return None
        name, *words = text.lower().split(",")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            numbers = [math.nan]
        if name == "minmax":
            return "an asymmetric range has a zero point, which the backward pass does not support; use absmax"
        fits = {
            "absmax": len(numbers) <= 1,
            "rms": len(numbers) == 1,
            "fixed": len(numbers) == 1 or (len(numbers) == 2 and numbers[0] == -numbers[1]),
        }
        if not fits.get(name) or not all(0 < number < math.inf for number in numbers[-1:]):
            return "must be absmax or absmax,FACTOR or rms,FACTOR or fixed,BOUND with a positive number"
        return None

    return (key,), problem


def _mtp(config: Config) -> str | None:
    return (
        "there are no such modules; set mtp_num_layers" if config.quantize_mtp and not config.mtp_num_layers else None
    )


def _rounding(config: Config) -> str | None:
    if not config[ROUNDING] or not config.quantization:
        return None
    if not is_integer(config):
        return "Qwix rounds fp8 to the nearest number; only int8 and int4 can be rounded stochastically"
    return None


def _rounded_head(config: Config) -> str | None:
    if rounds(config) and config.quantize_logits_proj:
        return "the output head has no random key, so its gradients cannot be rounded stochastically"
    return None


QUANTIZATION_CHECKS = (
    *map(_method, METHODS),
    (("quantize_mtp", "mtp_num_layers"), _mtp),
    (("quantization", ROUNDING), _rounding),
    (("quantization", ROUNDING, "quantize_logits_proj"), _rounded_head),
)
QUANTIZATION_INERT = (
    (KEYS, lambda c: not c.quantization, "nothing is quantized"),
    ((METHODS[4],), lambda c: not c.quantize_logits_proj, "quantize_logits_proj=false"),
    (("quantize_router_proj",), lambda c: not has_experts(c), "num_experts=1"),
)
