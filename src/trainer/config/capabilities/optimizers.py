"""The keys that each optimizer reads, and the size of its state. `optim/registry.py` has the optimizers."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.key_rows import Check, Inert, Resume, Row, refused, regexes
from trainer.config.keys import Config
from trainer.config.schema import FLOAT32_MAX

_ADAM = ("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask")


class Traits(NamedTuple):
    """The properties of an optimizer that the rest of the program uses."""

    # The keys that the optimizer reads. It gets no others, so any test of it fails if a key is missing here.
    reads: tuple[str, ...]
    # The number of float32 moments per trained parameter. The row and column sums of Adafactor do not count, nor do
    # moments that only some parameters have.
    full: int = 0
    # The key that sets the coefficient of the first moment, the moment that is stored in `mu_dtype`. If the value of
    # the key is 0, the optimizer has no first moment. None: no key removes the first moment.
    momentum: str | None = None


# Every optimizer that reads `mu_dtype` stores its first moment in that dtype.
TRAITS: dict[str, Traits] = {
    "adamw": Traits((*_ADAM, "mu_dtype"), full=1),
    "nadamw": Traits((*_ADAM, "mu_dtype"), full=1),
    "adam_pax": Traits(_ADAM, full=2),
    "muon": Traits(
        (
            *_ADAM,
            "muon_beta",
            "muon_weight_decay",
            "muon_consistent_rms",
            "muon_newton_schulz_dtype",
            "mu_dtype",
        )
    ),
    "sgd": Traits(("sgd_momentum", "mu_dtype"), momentum="sgd_momentum"),
    "lion": Traits(("lion_b1", "lion_b2", "lion_weight_decay", "adamw_mask", "mu_dtype")),
    "adafactor": Traits(
        (
            "adafactor_decay_rate",
            "adafactor_clipping_threshold",
            "adafactor_min_dim_size_to_factor",
            "adafactor_multiply_by_parameter_scale",
            "adafactor_momentum",
            "adafactor_weight_decay",
            "adamw_mask",
            "mu_dtype",
        ),
        momentum="adafactor_momentum",
    ),
}
# The keys that at least one optimizer reads.
KEYS = tuple(dict.fromkeys(key for traits in TRAITS.values() for key in traits.reads))


def has_first_moment(config: Config) -> bool:
    """Returns whether the configured optimizer stores an array in `mu_dtype` for each parameter that it updates."""
    traits = TRAITS[config.opt_type]
    return "mu_dtype" in traits.reads and (traits.momentum is None or config[traits.momentum] > 0)


def moment_bytes(config: Config, bytes_of: dict[str, int]) -> int:
    """Returns a lower bound on the bytes of optimizer state per trained parameter. `bytes_of` maps dtypes to bytes."""
    first = bytes_of[config.mu_dtype] if has_first_moment(config) else 0
    return first + TRAITS[config.opt_type].full * bytes_of["float32"]


def groups_of(value: Sequence[str]) -> list[tuple[str, float]]:
    """Returns a list of pairs (pattern, factor) from `value`, the value of the key learning_rate_groups.

    Raises:
      ValueError: an item is not of the form pattern=factor, where pattern is a regular expression and factor a number
        above 0.
    """
    groups = []
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
        groups.append((pattern, factor))
    return groups


def _consistent_rms(config: Config) -> str | None:
    number = config.muon_consistent_rms
    return None if number is None or 0 < number <= FLOAT32_MAX else f"must be a number in (0, {FLOAT32_MAX:g}], or none"


def _groups(config: Config) -> str | None:
    try:
        groups_of(config.learning_rate_groups)
    except ValueError as error:
        return str(error)
    return None


def _inert(name: str) -> list[Inert]:
    """Returns `Inert` entries for the keys that have no effect with the optimizer `name`."""
    keys, momentum = TRAITS[name].reads, TRAITS[name].momentum
    decays = [key for key in keys if key.endswith("_weight_decay")]
    others = [key for key in KEYS if key not in keys]
    rows = [Inert(others, lambda c: c.opt_type == name, f"opt_type={name} does not read it")]
    if decays:
        none = " and ".join(f"{key}=0" for key in decays)
        rows.append(Inert(["adamw_mask"], lambda c: c.opt_type == name and not any(c[key] for key in decays), none))
    if momentum:
        rows.append(Inert(["mu_dtype"], lambda c: c.opt_type == name and not has_first_moment(c), f"{momentum}=0"))
    return rows


ROWS = (Row(("opt_type", *KEYS, "learning_rate_groups"), Resume.UPDATE),)
CHECKS: tuple[Check, ...] = (
    (("muon_consistent_rms",), _consistent_rms),
    refused(
        ("opt_type", "adam_eps"),
        lambda c: c.opt_type == "muon" and not c.adam_eps,
        "muon divides each matrix by its norm plus adam_eps before Newton-Schulz, and the norm may be 0; adam_eps must "
        "be above 0, such as 1e-8",
    ),
    regexes("adamw_mask"),
    (("learning_rate_groups",), _groups),
)
INERT = (*(inert for name in TRAITS for inert in _inert(name)),)
