"""The keys of an update, except for its optimizer: dtypes, clipping, skipped steps, QK-Clip, frozen parameters."""

from trainer.config.key_rows import Check, Inert, Resume, Row, refused, regexes

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
    refused(
        ("use_qk_clip", "use_qk_norm"),
        lambda c: c.use_qk_clip and c.use_qk_norm,
        "norms of queries and keys undo any scaling of their weights, and already bound the logits; use one of the two",
    ),
    refused(
        ("use_qk_clip", "attn_logits_soft_cap"),
        lambda c: c.use_qk_clip and c.attn_logits_soft_cap,
        "a soft cap already bounds the logits, and scaling weights does not scale capped logits; use one of the two",
    ),
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
