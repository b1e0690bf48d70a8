"""Configurations from command lines, with their files, notes and errors."""

import pytest
import yaml

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema


def write(name: str, text: str) -> str:
    with open(name, "w") as file:
        file.write(text)
    return name


def notes(*argv: str) -> list[str]:
    """Returns the notes, without the note about the combination, which tests may change."""
    return [note for note in load(argv).notes if not note.startswith("combination")]


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv)
    return str(caught.value).split("\n  ")[1:]


def their_base(**changes) -> str:
    """Returns a file like MaxText's base.yml: our keys at MaxText's defaults, and many of MaxText's own keys."""
    values = {
        name: key.default for name, key in schema().keys.items() if name not in ("held_out_share", "data_pipeline")
    }
    values |= {name: value for name, value in base_yml.defaults().items() if name in values}
    values |= {
        name: it.neutral[0]
        for name, it in list(verdicts.verdicts().items())[::3]
        if it.neutral and "." not in name and name not in base_yml.TABLES
    }
    values |= {"hardware": "tpu", "rope_factor": 40, "compile_topology_num_slices": -1, "kv_proj": "remat"}
    values |= {"mesh_axes": ["a", "b"], "logical_axis_rules": [["nobody_knows", ["model"]]]}
    values |= dict.fromkeys(set(verdicts.table()["empty"]) & values.keys() - {"remat_policy"})  # as in e591f30
    values |= {"data_sharding": [["a"]]}  # not in any MaxText version that had scan_layers=false
    return yaml.safe_dump(values | changes, sort_keys=False)
