"""Collects ROWS, CHECKS, INERT and INERT_HERE (see `trainer.config.key_rows`) from the files of all capabilities.

`_FILES` must list every file. The order of the files in `_FILES` is the order of error messages.
"""

import importlib

from trainer.config import scale
from trainer.config.key_rows import Check, Inert, Place, Resume, Row
from trainer.config.schema import schema

_FILES = """
run_keys remat_tensors checkpoint_keys process_keys expert_keys attention_keys latent_keys recurrent_keys layer_keys
update_keys mesh_keys diloco_keys schedule_keys optimizers mtp_keys evaluation_keys decoding_keys rl_keys data_keys
token_keys chat_keys preference_keys compile_keys quantization_keys pipeline_keys context_keys sparsity_keys lora_keys
invariant_keys splash_tiles vocab_tiles distillation_keys
"""
_ALL = (scale, *(importlib.import_module(f"{__package__}.{name}") for name in _FILES.split()))
ROWS: tuple[Row, ...] = tuple(row for file in _ALL for row in getattr(file, "ROWS", ()))
CHECKS: tuple[Check, ...] = tuple(check for file in _ALL for check in getattr(file, "CHECKS", ()))
INERT: tuple[Inert, ...] = tuple(inert for file in _ALL for inert in getattr(file, "INERT", ()))
INERT_HERE: tuple[Inert, ...] = tuple(inert for file in _ALL for inert in getattr(file, "INERT_HERE", ()))


def keys_of(*resume: Resume) -> tuple[str, ...]:
    """Returns the keys for which `Row.resume` is one of the values `resume`."""
    return tuple(name for row in ROWS if row.resume in resume for name in row.names)


def paths_of(*places: Place) -> tuple[str, ...]:
    """Returns the keys for which `Row.path` is one of the values `places`."""
    return tuple(name for row in ROWS if row.path in places for name in row.names)


def step_keys() -> list[str]:
    """Returns the keys whose resolved values affect the compiled training step."""
    others = {name for row in ROWS if not row.step for name in row.names}
    return [name for name in schema().keys if name not in others]
