"""All optimizers by their `opt_type` in base.yml. `capabilities.optimizers.TRAITS` lists each optimizer's keys."""

from collections.abc import Callable
from typing import Any

import optax

from trainer.optim.adafactor import adafactor
from trainer.optim.adam_pax import adam_pax
from trainer.optim.adamw import adamw, nadamw
from trainer.optim.keys import Given
from trainer.optim.lion import lion
from trainer.optim.muon import muon
from trainer.optim.sgd import sgd

OPTIMIZERS: dict[str, Callable[[Any, Given], optax.GradientTransformation]] = {
    "adamw": adamw,
    "nadamw": nadamw,
    "adam_pax": adam_pax,
    "sgd": sgd,
    "muon": muon,
    "lion": lion,
    "adafactor": adafactor,
}
