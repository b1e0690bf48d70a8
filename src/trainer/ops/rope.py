"""Rotary position embedding (Su et al. 2021, RoFormer, arXiv:2104.09864) and its context-extension variants."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from trainer.ops.invariant import rounded

# The checkpoint name of the cos/sin tables, for rematerialization policies.
ROTATION = "rotation"

# A custom rotation: maps queries or keys [b, t, heads, d] and positions [b, t] to rotated queries or keys.
Rotation = Callable[[jax.Array, jax.Array], jax.Array]


class Rope(NamedTuple):
    """Parameters of the rotation. All fields except the following three correspond to keys of base.yml.

    `factors`: if `kind` is longrope, the factors of the wavelengths, for either short or long texts. `share`: the
    fraction of a head's entries, starting with the first, that is rotated. `rounded`: whether the two products of a
    rotation are rounded before they are added, so that surrounding code does not change the bits of the result
    (`ops.invariant.rounded`).
    """

    min_timescale: float
    max_timescale: float
    kind: str = "default"  # or llama3.1, longrope, yarn
    linear_scaling_factor: float = 1.0
    factor: float = 1.0
    original_length: int = 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: bool = False
    factors: tuple[float, ...] = ()
    share: float = 1.0
    interleave: bool = False
    rounded: bool = False


def rope(x_bthd: jax.Array, position_bt: jax.Array, how: Rope | Rotation) -> jax.Array:
    """Rotates the pairs of entries of each head by angles that grow with the position.

    Pair i of the d / 2 pairs turns by position * frequencies(how, d)[i] radians, where d = int(`share` * the entries of
    a head). Pair i is (x[i], x[i + d/2]), or with `interleave` (x[2i], x[2i + 1]). Computed in float32, returned in x's
    dtype. The arithmetic uses full heads, because half heads would leave half of each TPU register empty. If `how` is a
    `Rotation`, this function only calls it.
    """
    if not isinstance(how, Rope):
        return how(x_bthd, position_bt)
    width = x_bthd.shape[-1]
    frequency = frequencies(how, int(how.share * width)).astype(np.float32)
    angle = position_bt[..., None, None].astype(jnp.float32) * frequency
    scale = attention_scale(how)
    cos, sin = scale * jnp.cos(angle), scale * jnp.sin(angle)
    # All layers share the tables. Their checkpoint name lets a loop over rematerialized layers compute them only once.
    cos, sin = _per_entry(cos, cos, how), _per_entry(-sin, sin, how)
    if rest := width - cos.shape[-1]:
        cos, sin = (jnp.pad(it, [*[(0, 0)] * 3, (0, rest)], constant_values=i) for i, it in ((1, cos), (0, sin)))
    cos, sin = checkpoint_name((cos, sin), ROTATION)
    partner = _partner(x_bthd, how).astype(jnp.float32)  # permuted before the cast to move half the bytes
    parts = x_bthd.astype(jnp.float32) * cos, partner * sin
    rotated = jnp.add(*map(rounded, parts) if how.rounded else parts)
    return rotated.astype(x_bthd.dtype)


def _partner(x: jax.Array, how: Rope) -> jax.Array:
    """Returns, for each entry, the other entry of its pair."""
    if (rotated := int(how.share * x.shape[-1])) < x.shape[-1]:
        partner = _partner(x[..., :rotated], how._replace(share=1.0))
        return jnp.concatenate((partner, x[..., rotated:]), axis=-1)
    if how.interleave:
        return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    return jnp.roll(x, x.shape[-1] // 2, axis=-1)


def _per_entry(first: jax.Array, second: jax.Array, how: Rope) -> jax.Array:
    """Arranges values for the first and the second entries of pairs, each [..., d / 2], in the order of a head's
    entries, [..., d]."""
    if how.interleave:
        return jnp.stack((first, second), axis=-1).reshape(*first.shape[:-1], -1)
    return jnp.concatenate((first, second), axis=-1)


def frequencies(how: Rope, width: int) -> np.ndarray:
    """Returns the radians per token of each pair of a head of `width` entries: float64 [width / 2].

    Wavelengths, in units of 2 pi tokens, grow geometrically from `min_timescale` towards `max_timescale`. Then
    `how.kind` selects one of these changes:
    - default multiplies all wavelengths by `linear_scaling_factor` (Chen et al. 2023, arXiv:2306.15595);
    - llama3.1 multiplies by `factor` the wavelengths that fit fewer than `low_freq_factor` times into `original_length`
      tokens, keeps those that fit more than `high_freq_factor` times, and interpolates the frequencies in between by
      how many times the wavelength fits (the reference code of Llama 3.1, meta-llama/llama-models, `apply_scaling`);
    - yarn does the same with `beta_slow` and `beta_fast` as the two limits, but interpolates by the index of the pair
      (Peng et al. 2023, arXiv:2309.00071, and its reference code);
    - longrope multiplies each wavelength by one of the `factors` (Ding et al. 2024, arXiv:2402.13753).
    """
    ratio = how.max_timescale / how.min_timescale
    plain = 1 / (how.min_timescale * ratio ** (np.arange(0, width, 2) / width))
    if how.kind == "default":
        return plain / how.linear_scaling_factor
    if how.kind == "longrope":
        return plain / np.array(how.factors)
    if how.kind == "llama3.1":
        turns = how.original_length / (2 * math.pi) * plain
        # Avoids a division by 0: in the published configurations of Llama 4, the two factors are equal.
        kept: np.ndarray = (turns - how.low_freq_factor) / max(how.high_freq_factor - how.low_freq_factor, 1e-30)
    else:
        assert how.kind == "yarn", how.kind
        low, high = _yarn_range(how, width)
        kept = 1 - (np.arange(width // 2) - low) / (high - low)
    share = np.clip(kept, 0, 1)
    return share * plain + (1 - share) * plain / how.factor


def attention_scale(how: Rope) -> float:
    """Returns the factor on the rotated entries of queries and keys; without attention scaling, 1.

    YaRN: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4). LongRoPE: sqrt(1 + ln(factor) / ln(original length)), as
    in the published models.
    """
    if not how.attention_scaling or how.kind not in ("longrope", "yarn"):
        return 1.0
    if how.kind == "longrope":
        return math.sqrt(1 + math.log(how.factor) / math.log(how.original_length))
    return 0.1 * math.log(how.factor) + 1


def score_scale(how: Rope, mscale: float) -> float:
    """Returns the factor on attention scores in DeepSeek's use of YaRN, (0.1 mscale ln(factor) + 1)^2; 1 without YaRN.

    The formula is from the reference code of DeepSeek-V2 (arXiv:2405.04434), where `mscale` is called `mscale_all_dim`.
    This factor replaces that of `attention_scale`, which would scale only the rotated part of queries and keys.
    """
    return (0.1 * mscale * math.log(how.factor) + 1) ** 2 if how.kind == "yarn" else 1.0


def _yarn_range(how: Rope, width: int) -> tuple[float, float]:
    """Returns the two pair indices between which YaRN interpolates. The pairs at these indices make `beta_fast` and
    `beta_slow` turns over `original_length` tokens."""

    def pair(turns: float) -> float:
        wavelength = how.original_length / (2 * math.pi * turns)
        return width / 2 * math.log(wavelength / how.min_timescale) / math.log(how.max_timescale / how.min_timescale)

    low, high = pair(how.beta_fast), pair(how.beta_slow)
    if how.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return low, max(high, low + 0.001)  # keeps the range nonempty, as in the reference code
