"""Applies the key global_parameter_scale, which multiplies the number of the model's parameters by about its value."""

from trainer.config.key_rows import Check
from trainer.config.keys import Config
from trainer.config.reader import Setting


def factors(scale: int) -> dict[str, int]:
    """Returns a factor for each size; together, they multiply the number of parameters by about `scale`, a power of
    two.

    If log2(scale) = 3 a + r, the factors are 2^a for layers, 2^(a + [r > 0]) for heads and MLP, and 2^(a + [r > 1]) for
    the width, as in MaxText. `head_dim` and `vocab_size` do not change.
    """
    a, r = divmod(scale.bit_length() - 1, 3)
    heads = 2 ** (a + (r > 0))
    return {
        "base_emb_dim": 2 ** (a + (r > 1)),
        "base_num_query_heads": heads,
        "base_num_kv_heads": heads,
        "base_mlp_dim": heads,
        "base_moe_mlp_dim": heads,
        "base_num_decoder_layers": 2**a,
    }


SCALED = tuple(factors(1))  # the keys that global_parameter_scale multiplies


def scaled(values: dict[str, Setting]) -> dict[str, Setting]:
    """Returns the settings with the sizes multiplied according to `global_parameter_scale`, and that key set to 1.

    Only this function applies the scale. Everything that reads a size later, including a run's config.yml, gets the
    scaled size. Nothing changes if the scale is not a power of two; `problem` reports it.
    """
    scale = values["global_parameter_scale"]
    if scale.value == 1 or not is_power_of_two(scale.value):
        return values
    grown = {
        name: Setting(
            values[name].value * factor, f"{values[name].where}, x {factor} by global_parameter_scale={scale.value}"
        )
        for name, factor in factors(scale.value).items()
        if factor > 1 and values[name].value > 0  # -1: the model has no such size
    }
    return values | grown | {"global_parameter_scale": Setting(1, scale.where)}


def growth(values: dict[str, Setting], sized: dict[str, Setting]) -> list[str]:
    """Returns a list with one line about the sizes that `scaled` changed; [] if it changed none. `sized`: the result of
    `scaled`."""
    if sized is values:
        return []
    sizes = [
        f"{name} {values[name].value} -> {setting.value}"
        for name, setting in sized.items()
        if name != "global_parameter_scale" and setting.value != values[name].value
    ]
    return [f"global_parameter_scale={values['global_parameter_scale'].value}: {', '.join(sizes)}"]


def is_power_of_two(scale: int) -> bool:
    """Returns whether `scale` is 1, 2, 4, ..."""
    return scale >= 1 and scale & (scale - 1) == 0


def problem(config: Config) -> str | None:
    """Returns why `scaled` did not apply the scale. Returns None if `scaled` did apply it, and therefore set the key to
    1."""
    scale = config.global_parameter_scale
    if is_power_of_two(scale):
        return None
    below = 1 << (scale.bit_length() - 1)
    return f"must be a power of two; nearest: {below} or {2 * below}; for a size between them set the base_* keys"


CHECKS: tuple[Check, ...] = ((("global_parameter_scale",), problem),)
