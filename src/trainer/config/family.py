"""The facts about a model family that stage 1 needs. Stage 1 reads and checks a configuration without JAX."""

import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.errors import UserError, nearest, shortened
from trainer.config.keys import Config
from trainer.config.schema import schema

Axes = tuple[str, ...]
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Keys that only some families with experts read.
OF_SOME = (
    *("first_num_dense_layers", "shared_experts", "routed_scaling_factor", "n_routing_groups", "topk_routing_group"),
    *("routed_score_func", "routed_bias"),
)
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_multiplier")
# Keys of families with recurrent layers: the pattern of layers, and the sizes of the recurrent layers.
PATTERN = "inhomogeneous_layer_cycle_interval"
RECURRENT = (
    *("gdn_num_key_heads", "gdn_num_value_heads", "gdn_key_head_dim", "gdn_value_head_dim"),
    "gdn_conv_kernel_dim",
)
# Keys that the blocks of only some families read. Other families refuse these keys instead of ignoring them, because
# their blocks cannot make the model that the keys describe.
BLOCK_KEYS = (
    *("attention_bias", "sliding_window_pattern", "nope_layer_interval", "use_post_attn_norm", "use_post_ffw_norm"),
    *("partial_rotary_factor", "rope_short_factor", "rope_long_factor"),
    *("chunk_attn_window_size", "mlp_activations_limit"),
    *("temperature_tuning", "temperature_tuning_scale", "temperature_tuning_floor_scale"),
    *MULTIPLIERS,
    *RECURRENT,
)
# The keys that the blocks of some, but not all families read.
OPTIONAL = ("num_experts", "norm_topk_prob", *OF_SOME, *LATENT, "fused_qkv", PATTERN, *BLOCK_KEYS)
ROPE = (
    *("rope_min_timescale", "rope_max_timescale", "rope_type", "rope_linear_scaling_factor", "rope_factor"),
    *("original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor", "beta_fast", "beta_slow"),
    *("rope_truncate", "rope_attention_scaling", "rope_interleave", "local_rope_max_timescale"),
)
_MODULE = "facts"  # the name of a module that stage 1 may import


@dataclass(frozen=True)
class Facts:
    """The facts of a model family, defined in a module called `facts` that imports only `trainer.config`.

    Attributes:
      family: the import path `module:NAME` of the implementation: a `trainer.models.family.Family` or, for a family
        with only one class of blocks, that class.
      reads: the keys of `OPTIONAL` that its blocks read. The other keys of `OPTIONAL` have no effect, or are refused.
      ignores: maps a reason, such as "has no rotary positions", to keys outside of `OPTIONAL` that its blocks do not
        read for this reason.
      fixes: maps each key that has the same value in every configuration of this family to that value.
      sinks: whether its attention has sinks (see `trainer.ops.attention`), which some kernels do not support.
      recurrent: whether its blocks mix the tokens of a row by other means than attention, for example by a recurrent
        state. If so, the tokens of a row cannot be split over devices.
      has_rest: whether the last repetition of its pattern of `interleave_moe_layer_step` layers may be incomplete.
      maxtext_layers: the number of layers that MaxText counts as one.
      maxtext_words: maps arguments of MaxText's commands, `key=value` in lower case, to the arguments of this trainer
        to which `trainer.from_maxtext` converts them. An argument is mapped to "" if the family always has this value;
        other values of its key are refused.
      period: n if every n-th layer attends to the whole document, and all other layers attend within a window of
        `sliding_window_size` tokens. The key `sliding_window_pattern` overrides n. 0: `attention_type` applies to every
        layer.
      checks: the family's checks. Each is a pair of keys and a function. Given the configuration, the function returns
        what is wrong with the values of the keys, or None.
      tensors: a function of the configuration. It returns a dict from the names of the model's tensors, as far as
        known, to their logical axes; {} if only the tensors in `trainer.config.tensors.EVERY_MODEL` are known. Stage 1
        checks the sizes and rules of these tensors; other tensors are checked when the model is made.
    """

    family: str
    reads: Sequence[str] = ()
    ignores: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fixes: Mapping[str, Any] = field(default_factory=dict)
    sinks: bool = False
    recurrent: bool = False
    period: int = 0
    has_rest: bool = False
    maxtext_layers: int = 1
    maxtext_words: Mapping[str, str] = field(default_factory=dict)
    checks: Sequence[tuple[Sequence[str], Callable[[Any], str | None]]] = ()
    tensors: Callable[[Config], Mapping[str, Axes]] = lambda config: {}

    def __post_init__(self) -> None:
        several = {"reads": self.reads} | {f"ignores[{why!r}]": keys for why, keys in self.ignores.items()}
        for name, written in several.items():
            if isinstance(written, str):
                raise UserError(f"Facts.{name}: write ({written!r},), with a comma, for {written!r}")
        if unknown := [key for key in self.reads if key not in OPTIONAL]:
            raise UserError(
                f"Facts.reads: {unknown[0]} is not one of {', '.join(OPTIONAL)}{nearest(unknown[0], OPTIONAL)}"
            )
        named, keys = (*self.ignores.values(), self.fixes, *(of_check for of_check, _ in self.checks)), schema().keys
        if unknown := [key for each in named for key in each if key not in keys]:
            raise UserError(f"Facts: there is no key {unknown[0]}{nearest(unknown[0], keys)}")


@functools.cache
def families() -> Mapping[str, str]:
    """Returns a dict from each decoder_block to the import path of its facts. Import paths avoid a circular import,
    because `trainer.models` imports `trainer.config`."""
    return importlib.import_module("trainer.models").FAMILIES


def imported(path: str, decoder_block: str) -> Any:
    """Returns the object at an import path `module:NAME`. Error messages begin with the key decoder_block.

    Raises:
      UserError: there is no such module or name, or importing the module fails.
    """
    module, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or str(error)
        by = "" if f"{module}.".startswith(f"{missing}.") else f", which {module} imports"
        raise UserError(
            f"decoder_block={decoder_block}: there is no module {missing}{by}; Python searches the current folder, "
            "PYTHONPATH and installed packages"
        ) from None
    except (Exception, SystemExit) as error:  # a user's module can raise any exception
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"decoder_block={decoder_block}: importing {module} fails: {type(error).__name__}: "
            f"{shortened(str(error))} ({at.filename}:{at.lineno})"
        ) from error
    if not hasattr(found, attribute):
        public = [name for name in vars(found) if not name.startswith("_")]
        raise UserError(f"decoder_block={decoder_block}: {module} has no {attribute}{nearest(attribute, public)}")
    return getattr(found, attribute)


def import_facts(decoder_block: str) -> None:
    """Imports a family's facts, if `decoder_block` is the import path of an object in a module called `facts`.
    Other modules may import JAX, so they are imported in stage 2.

    Call this only for a module that the user has named: it runs the module's code.

    Raises:
      UserError: the module cannot be imported, or the named object is not `Facts`.
    """
    module = decoder_block.partition(":")[0]
    if module.rpartition(".")[2] == _MODULE and not isinstance(imported(decoder_block, decoder_block), Facts):
        raise UserError(f"decoder_block={decoder_block}: this is not a trainer.config.family.Facts")


def facts_of(config: Config) -> Facts | None:
    """Returns the facts of the family of `config`. None if the facts are unknown, because the family's import path does
    not lead to facts, or because the facts have not been imported."""
    return _facts(config.decoder_block)


def _facts(block: str) -> Facts | None:
    module, _, name = families().get(block, block).partition(":")
    if block in families():
        importlib.import_module(module)
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, Facts) else None


def reads(config: Config, key: str) -> bool:
    """Returns whether the family is known to read `key`, one of `OPTIONAL`."""
    facts = facts_of(config)
    return facts is not None and key in facts.reads


def lacks(config: Config, key: str) -> bool:
    """Returns whether the family is known not to read `key`, one of `OPTIONAL`."""
    facts = facts_of(config)
    return facts is not None and key not in facts.reads


def fixed(config: Config) -> Mapping[str, Any]:
    """Returns `Facts.fixes` of the family of `config`; {} if the facts are unknown."""
    facts = facts_of(config)
    return facts.fixes if facts else {}


def has_sinks(config: Config) -> bool:
    """Returns whether the family's attention is known to have sinks."""
    facts = facts_of(config)
    return facts is not None and facts.sinks


@functools.cache
def readers(key: str) -> str:
    """Returns the families of this package that read `key`, separated by commas."""
    return ", ".join(name for name in families() if (facts := _facts(name)) and key in facts.reads)
