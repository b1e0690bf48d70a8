"""Turns base.yml, presets and `key=value` into one frozen configuration. Importing it loads neither JAX nor Flax."""

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.capabilities.token_keys import split_ratios, token_files
from trainer.config.derived import eval_batch_rows, eval_parts, global_batch_rows, mesh_axes, microbatch_rows
from trainer.config.dump import to_yaml
from trainer.config.errors import (
    NotBuilt,
    RunStopped,
    UserError,
    closed_at_interrupt,
    command_line,
    exit_on_user_error,
    nearest,
)
from trainer.config.flags import COMBINATIONS, combination, flags_of, linen_stack
from trainer.config.help import explanation, help_text, prints_usage, question
from trainer.config.keys import Config
from trainer.config.load import Begun, Description, Loaded, begin, load
from trainer.config.resolve import resolve
from trainer.config.resume import (
    another_program,
    another_update,
    check_islands,
    check_optimizer,
    check_resume,
    islands_of,
    resets,
)
from trainer.config.rules import make_rules
from trainer.config.saved import read_saved
from trainer.config.schema import Key, Schema, schema
from trainer.config.sides import Side, differences, load_against, load_sides

__all__ = [
    "COMBINATIONS",
    "Begun",
    "Config",
    "Description",
    "Key",
    "Loaded",
    "NotBuilt",
    "RunStopped",
    "Schema",
    "Side",
    "UserError",
    "another_program",
    "another_update",
    "begin",
    "check_islands",
    "check_optimizer",
    "check_resume",
    "closed_at_interrupt",
    "combination",
    "command_line",
    "differences",
    "eval_batch_rows",
    "eval_parts",
    "exit_on_user_error",
    "explanation",
    "flags_of",
    "global_batch_rows",
    "help_text",
    "islands_of",
    "linen_stack",
    "load",
    "load_against",
    "load_sides",
    "make_rules",
    "mesh_axes",
    "microbatch_rows",
    "nearest",
    "parse_mixture",
    "prints_usage",
    "question",
    "read_saved",
    "resets",
    "resolve",
    "schema",
    "split_ratios",
    "to_yaml",
    "token_files",
]
