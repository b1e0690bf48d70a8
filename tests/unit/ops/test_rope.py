import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.rope import Rope, attention_scale, frequencies, rope

# A head of 16 entries has short, mixed and long wavelengths (6.3, 19.9, 62.8, 199, ... tokens).
KINDS = {
    "default": Rope(1, 10000),
    "linear": Rope(1, 10000, linear_scaling_factor=4.0),
    "llama3.1": Rope(1, 10000, "llama3.1", factor=8.0, original_length=64),
    "yarn": Rope(1, 10000, "yarn", factor=4.0, original_length=64, beta_fast=4.0, beta_slow=0.5),
    "yarn_scaled": Rope(1, 10000, "yarn", factor=4.0, original_length=64, attention_scaling=True),
    "yarn_exact": Rope(1, 10000, "yarn", factor=4.0, original_length=64, beta_fast=4.0, beta_slow=0.5, truncate=False),
}
WIDTH = 16
WAVELENGTHS = 2 * np.pi * np.sqrt(10.0) ** np.arange(8)

every_kind = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
both_layouts = pytest.mark.parametrize("interleave", [False, True], ids=["halves", "pairs"])


def turned_by_hand(x, position, frequency, scale=1.0):
    """Rotates halves as complex numbers, in float64."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:].astype(np.float64)
    turned = scale * pairs * np.exp(1j * position[..., None, None] * frequency)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def head(seed=0, shape=(2, 6, 3, WIDTH)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def halves_to_pairs(x):
    """Reorders a head's columns from halves to adjacent pairs."""
    order = np.arange(x.shape[-1]).reshape(2, -1).T.reshape(-1)
    return x[..., order]


def test_default_turns_by_the_position_over_a_geometric_row_of_timescales():
    position = np.random.default_rng(0).integers(0, 2000, (2, 6))
    expected = turned_by_hand(head(), position, 10000.0 ** -(np.arange(8) / 8))
    np.testing.assert_allclose(rope(head(), jnp.asarray(position), KINDS["default"]), expected, atol=3e-4)


def test_timescales_start_at_the_shortest():
    np.testing.assert_allclose(frequencies(Rope(4, 64), 4), [1 / 4, 1 / 16], rtol=1e-12)


def test_linear_multiplies_every_wavelength():
    np.testing.assert_allclose(2 * np.pi / frequencies(KINDS["linear"], WIDTH), 4 * WAVELENGTHS, rtol=1e-12)


def test_llama31_by_hand():
    """For 64 tokens: wavelengths below 16 are unchanged, wavelengths above 64 grow eightfold, and the frequencies
    between are interpolated."""
    expected = []
    for wavelength in WAVELENGTHS:
        if wavelength < 64 / 4:
            expected.append(1 / wavelength)
        elif wavelength > 64:
            expected.append(1 / (8 * wavelength))
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) / (8 * wavelength) + smooth / wavelength)
    ratio = np.array(expected) * WAVELENGTHS
    assert ratio[0] == 1
    assert np.all((ratio[1:3] < 0.9) & (ratio[1:3] > 1 / 8))
    assert np.all(ratio[3:] == 1 / 8)
    np.testing.assert_allclose(frequencies(KINDS["llama3.1"], WIDTH), 2 * np.pi * np.array(expected), rtol=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_by_hand(truncate):
    """The number of turns in 64 tokens, solved for the pair index: 4 turns at 0.81, half a turn at 2.62."""
    low, high = (4 * np.log(64 / (2 * np.pi * turns)) / np.log(100) for turns in (4, 0.5))
    assert (round(low, 2), round(high, 2)) == (0.81, 2.62)
    if truncate:
        low, high = 0, 3
    stretched = np.array([min(max((i - low) / (high - low), 0), 1) for i in range(8)])
    assert (stretched[0], *stretched[3:]) == (0, 1, 1, 1, 1, 1)
    expected = (1 - stretched + stretched / 4) * 2 * np.pi / WAVELENGTHS
    how = KINDS["yarn" if truncate else "yarn_exact"]
    np.testing.assert_allclose(frequencies(how, WIDTH), expected, rtol=1e-12)


def test_yarn_range_ends_within_the_head_and_is_never_empty():
    plain, stretched = frequencies(KINDS["default"], WIDTH), frequencies(KINDS["linear"], WIDTH)
    how = Rope(1, 10000, "yarn", factor=4.0)
    # Even the shortest wavelength turns less than once, so all other wavelengths are stretched.
    np.testing.assert_allclose(frequencies(how._replace(original_length=6), WIDTH), [plain[0], *stretched[1:]])
    # Even the longest wavelength turns more than beta_fast times.
    np.testing.assert_array_equal(frequencies(how._replace(original_length=10**12), WIDTH), plain)
    # The range is pair 4 to 16.4, clamped to 15 as in the reference code.
    cut = frequencies(how._replace(original_length=10**9, beta_fast=1e6), WIDTH)
    share = np.clip((np.arange(8) - 4) / (15 - 4), 0, 1)
    np.testing.assert_allclose(cut, (1 - share) * plain + share * stretched, rtol=1e-12)


def test_only_yarn_scales_and_only_if_asked():
    assert attention_scale(KINDS["yarn_scaled"]) == pytest.approx(1 + 0.1 * np.log(4))
    scales = {name: attention_scale(how) for name, how in KINDS.items() if name != "yarn_scaled"}
    assert set(scales.values()) == {1.0}
    assert attention_scale(KINDS["llama3.1"]._replace(attention_scaling=True)) == 1


@every_kind
@both_layouts
def test_pairs_turn_by_frequency_times_position(how, interleave):
    position = np.array([[0, 1, 2, 3, 0, 1], [5, 6, 7, 8, 100, 101]])
    expected = turned_by_hand(head(), position, frequencies(how, WIDTH), attention_scale(how))
    x = halves_to_pairs(head()) if interleave else head()
    expected = halves_to_pairs(expected) if interleave else expected
    np.testing.assert_allclose(rope(x, jnp.asarray(position), how._replace(interleave=interleave)), expected, atol=5e-5)


@every_kind
@both_layouts
def test_scores_depend_on_the_distance_only(how, interleave):
    how = how._replace(interleave=interleave)
    query, key = head(1, (2, 1, 1, 1, WIDTH))

    def score(i, j):
        turned = [rope(x, jnp.full((1, 1), p), how) for x, p in ((query, i), (key, j))]
        return float(jnp.sum(turned[0] * turned[1]))

    np.testing.assert_allclose(score(7, 3), score(107, 103), rtol=2e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


@every_kind
def test_a_head_with_permuted_columns_gives_the_same_scores(how):
    position = jnp.arange(6)[None]
    query, key = head(2, (2, 1, 6, 3, WIDTH))

    def scores(query, key, how):
        return jnp.einsum("bthd,bshd->bhts", rope(query, position, how), rope(key, position, how))

    in_halves = scores(query, key, how)
    in_pairs = scores(halves_to_pairs(query), halves_to_pairs(key), how._replace(interleave=True))
    np.testing.assert_allclose(in_pairs, in_halves, atol=1e-5)
    assert np.abs(scores(query, key, how._replace(interleave=True)) - in_halves).max() > 0.1


def test_the_kinds_differ():
    rows = [frequencies(how, WIDTH) for name, how in KINDS.items() if name != "yarn_scaled"]
    for i, row in enumerate(rows):
        assert all(np.abs(row / other - 1).max() > 0.05 for other in rows[:i])


@both_layouts
def test_keeps_the_dtype_and_computes_in_float32(interleave):
    how = Rope(1, 10000, interleave=interleave)
    x = jnp.asarray(head(), jnp.bfloat16)
    position = jnp.full((2, 6), 1001)
    out = rope(x, position, how)
    assert out.dtype == jnp.bfloat16
    expected = rope(x.astype(jnp.float32), position, how).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out.astype(jnp.float32), expected.astype(jnp.float32))


def test_frequencies_are_constants_of_the_compiled_code():
    text = jax.jit(lambda x: rope(x, jnp.arange(6)[None], KINDS["yarn"])).lower(head(shape=(1, 6, 3, WIDTH))).as_text()
    assert "power" not in text
    assert "log" not in text
