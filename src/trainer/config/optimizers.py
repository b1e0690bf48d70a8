"""Which keys each optimizer reads, and what its state takes at least. `optim/registry.py` has the optimizers."""

import math
import re
from collections.abc import Sequence
from typing import Any

_ADAM = ("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask")

# An optimizer is given these keys alone, so that an entry that lacks a key fails in its first test.
READS: dict[str, tuple[str, ...]] = {
    "adamw": (*_ADAM, "mu_dtype"),
    "nadamw": (*_ADAM, "mu_dtype"),
    "adam_pax": _ADAM,
    "muon": (
        *_ADAM,
        "muon_beta",
        "muon_weight_decay",
        "muon_consistent_rms",
        "muon_newton_schulz_dtype",
        "mu_dtype",
    ),
    "sgd": ("sgd_momentum", "mu_dtype"),
    "lion": ("lion_b1", "lion_b2", "lion_weight_decay", "adamw_mask", "mu_dtype"),
    "adafactor": (
        "adafactor_decay_rate",
        "adafactor_clipping_threshold",
        "adafactor_min_dim_size_to_factor",
        "adafactor_multiply_by_parameter_scale",
        "adafactor_momentum",
        "adafactor_weight_decay",
        "adamw_mask",
        "mu_dtype",
    ),
}
# The keys that some optimizer reads.
KEYS = tuple(dict.fromkeys(key for keys in READS.values() for key in keys))
# Optimizers whose first moment exists only if this coefficient is above 0.
MOMENTUM = {"sgd": "sgd_momentum", "adafactor": "adafactor_momentum"}


def has_first_moment(config: Any) -> bool:
    """Whether the configured optimizer keeps an array in `mu_dtype` for each parameter that it updates."""
    momentum = MOMENTUM.get(config["opt_type"])
    return "mu_dtype" in READS[config["opt_type"]] and (momentum is None or config[momentum] > 0)


def moment_bytes(config: Any, bytes_of: dict[str, int]) -> int:
    """The least bytes of optimizer state that any trained parameter takes, from `bytes_of` each dtype.

    Adafactor's sums over rows and columns count as nothing, and so does the second moment of optimizers that have none
    for some parameters.
    """
    first = bytes_of[config["mu_dtype"]] if has_first_moment(config) else 0
    second = bytes_of[config["weight_dtype"]]
    return first + {"adamw": second, "nadamw": second, "adam_pax": 2 * second}.get(config["opt_type"], 0)


def groups_of(value: Sequence[str]) -> list[tuple[str, float]]:
    """The patterns of `learning_rate_groups` and their factors.

    Raises:
      ValueError: an item is not pattern=factor, with a regular expression and a number above 0.
    """
    found = []
    for item in value:
        pattern, equals, text = item.rpartition("=")
        try:
            factor = float(text)
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        except ValueError:
            factor = math.nan
        if not (equals and pattern) or not 0 < factor < math.inf:
            hint = "; trainable_parameters_mask freezes parameters" if factor == 0 else ""
            raise ValueError(f"{item!r} is not pattern=factor with a factor above 0, such as embedding=0.1{hint}")
        found.append((pattern, factor))
    return found
