"""Learning rate as a function of the number of updates done."""

import optax


def make_schedule(config) -> optax.Schedule:
    """Linear warm-up from 0 to `learning_rate`, then the shape that `lr_schedule_type` names.

    The schedule takes `learning_rate_schedule_steps` updates: the first `warmup_steps_fraction` of them warm up, the
    last one runs at the final rate, `learning_rate_final_fraction` of the peak, which then stays. wsd (warm-up, stable,
    decay; Hu et al. 2024, arXiv:2404.06395) keeps the peak until its last `wsd_decay_steps_fraction`. The first update
    already has a rate above 0: update i of w warm-up updates runs at (i + 1) / w of the peak.
    """
    peak, final = config.learning_rate, config.learning_rate * config.learning_rate_final_fraction
    length = config.learning_rate_schedule_steps
    warmup = int(length * config.warmup_steps_fraction)
    # Transitions end at the last update, whose index is length - 1.
    rest = max(length - warmup - 1, 1)
    kind = config.lr_schedule_type
    if kind == "constant":
        parts, boundaries = [optax.constant_schedule(peak)], []
    elif kind == "wsd":
        decay = int(length * config.wsd_decay_steps_fraction)
        stable = rest - decay
        shape = _cosine if config.wsd_decay_style == "cosine" else optax.linear_schedule
        parts, boundaries = [optax.constant_schedule(peak), shape(peak, final, max(decay, 1))], [warmup + stable]
    else:
        shape = _cosine if kind == "cosine" else optax.linear_schedule
        parts, boundaries = [shape(peak, final, rest)], []
    if warmup == 0:
        return optax.join_schedules(parts, boundaries)
    ramp = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([ramp, *parts], [warmup, *boundaries])


def _cosine(start: float, end: float, steps: int) -> optax.Schedule:
    """Half a cosine from `start` to `end`."""

    def schedule(count):
        wave = optax.cosine_decay_schedule(1.0, steps)(count)  # from 1 to 0
        return end + (start - end) * wave

    return schedule
