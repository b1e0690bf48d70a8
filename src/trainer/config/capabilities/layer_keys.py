"""The keys of positions, the MLP, dropout and the loop over layers. `attention_keys` has the keys of attention."""

import math

from trainer.config.errors import nearest, shortened
from trainer.config.key_rows import Check, Inert, Resume, Row, refused
from trainer.config.keys import Config

# The names of functions of jax.nn. "gelu" is the tanh approximation of GELU; "linear" is the identity.
ACTIVATIONS = ("silu", "gelu", "relu", "tanh", "sigmoid", "linear")


def _rotated(config: Config) -> str | None:
    rotated = int(config.head_dim * config.partial_rotary_factor)
    if config.partial_rotary_factor == 1 or (rotated >= 2 and rotated % 2 == 0):
        return None
    return f"RoPE would rotate {rotated} entries of a head; the number must be even, and at least 2"


def _longrope(config: Config) -> str | None:
    if config.rope_type != "longrope":
        return None
    pairs = int(config.head_dim * config.partial_rotary_factor) // 2
    for key in ("rope_short_factor", "rope_long_factor"):
        if len(config[key]) != pairs or not all(0 < factor < math.inf for factor in config[key]):
            return f"with rope_type=longrope {key} must have one positive number for each of the {pairs} rotated pairs"
    return None


def _activations(config: Config) -> str | None:
    if len(config.mlp_activations) not in (1, 2):
        return f"must be one activation, or two for a gated MLP; allowed: {', '.join(ACTIVATIONS)}"
    for name in config.mlp_activations:
        if name not in ACTIVATIONS:
            allowed = f"{', '.join(ACTIVATIONS)}{nearest(name, ACTIVATIONS)}"
            return f"there is no activation {shortened(name)}; allowed: {allowed}"
    return None


ROWS = (Row(("scan_layers",), Resume.LAYOUT),)
CHECKS: tuple[Check, ...] = (
    refused(
        ("rope_min_timescale", "rope_max_timescale"),
        lambda c: c.rope_min_timescale >= c.rope_max_timescale,
        "the shortest wavelength must be less than the longest",
    ),
    refused(
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.rope_type == "llama3.1" and c.rope_low_freq_factor > c.rope_high_freq_factor,
        "with rope_type=llama3.1 the low factor must not be greater than the high one",
    ),
    refused(
        ("beta_slow", "beta_fast"),
        lambda c: c.rope_type == "yarn" and c.beta_slow > c.beta_fast,
        "with rope_type=yarn beta_slow must not be greater than beta_fast",
    ),
    (("head_dim", "partial_rotary_factor"), _rotated),
    (("rope_short_factor", "rope_long_factor"), _longrope),
    refused(
        ("rope_factor", "original_max_position_embeddings"),
        lambda c: c.rope_type == "longrope" and not (c.rope_factor and c.original_max_position_embeddings > 1),
        "with rope_type=longrope both must be given, and the original length must be at least 2",
    ),
    (("mlp_activations",), _activations),
    refused(
        ("trainable_position_size", "max_target_length"),
        lambda c: -1 != c.trainable_position_size < c.max_target_length,
        "a row has more positions than the table; increase trainable_position_size",
    ),
)
INERT = (
    Inert(("rope_linear_scaling_factor",), lambda c: c.rope_type != "default", "rope_type is not default"),
    Inert(("rope_factor", "original_max_position_embeddings"), lambda c: c.rope_type == "default", "rope_type=default"),
    Inert(
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.rope_type != "llama3.1",
        "rope_type is not llama3.1",
    ),
    Inert(("beta_fast", "beta_slow", "rope_truncate"), lambda c: c.rope_type != "yarn", "rope_type is not yarn"),
    Inert(
        ("rope_attention_scaling",),
        lambda c: c.rope_type not in ("longrope", "yarn"),
        "rope_type is not longrope or yarn",
    ),
    Inert(("rope_short_factor", "rope_long_factor"), lambda c: c.rope_type != "longrope", "rope_type is not longrope"),
    Inert(
        ("temperature_tuning_scale", "temperature_tuning_floor_scale"),
        lambda c: not c.temperature_tuning,
        "temperature_tuning=false",
    ),
    Inert(("dropout_rate", "attention_dropout_rate"), lambda c: not c.enable_dropout, "enable_dropout=false"),
    Inert(("normalize_embedding_logits",), lambda c: not c.logits_via_embedding, "logits_via_embedding=false"),
)
