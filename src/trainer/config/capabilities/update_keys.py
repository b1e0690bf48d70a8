"""The keys of an update beside its optimizer: dtypes, clipping, skipped steps, QK-Clip, frozen parameters."""

from trainer.config.key_rows import Check, Inert, Resume, Row, regexes
from trainer.config.keys import Config


def _clip_and_norm(config: Config) -> str | None:
    if config.use_qk_clip and config.use_qk_norm:
        return (
            "norms of queries and keys undo a scale of their weights, and bound the logits already; use one of the two"
        )
    return None


def _clip_and_cap(config: Config) -> str | None:
    if config.use_qk_clip and config.attn_logits_soft_cap:
        return "a soft cap bounds the logits already, and scaled weights do not scale capped logits; use one of the two"
    return None


ROWS = (
    Row(
        (
            *("trainable_parameters_mask", "grad_dtype", "weight_stochastic_rounding", "gradient_clipping_value"),
            *("gradient_clipping_threshold", "skip_step_on_spikes", "skip_step_interval", "ema_decay"),
            *("use_qk_clip", "qk_clip_threshold", "qk_clip_interval"),
        ),
        Resume.UPDATE,
    ),
    Row(("skip_step_scaling_factor",), Resume.AROUND),
)
CHECKS: tuple[Check, ...] = (
    (("use_qk_clip", "use_qk_norm"), _clip_and_norm),
    (("use_qk_clip", "attn_logits_soft_cap"), _clip_and_cap),
    regexes("trainable_parameters_mask"),
)
INERT = (
    Inert(("qk_clip_threshold", "qk_clip_interval"), lambda c: not c.use_qk_clip, "use_qk_clip=false"),
    Inert(
        ("skip_step_interval", "skip_step_scaling_factor"),
        lambda c: not c.skip_step_on_spikes,
        "skip_step_on_spikes=false",
    ),
    Inert(
        ("weight_stochastic_rounding",), lambda c: c.weight_dtype == "float32", "weight_dtype=float32 loses no updates"
    ),
)
