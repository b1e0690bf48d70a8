"""The keys that define how a model uses its parameters, and the comparison of these keys between two sources."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config.capabilities.data_keys import without_rows
from trainer.config.capabilities.expert_keys import dense_layers, has_experts, some_experts
from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.capabilities.quantization_keys import OF_STORED, asks_for_floats
from trainer.config.capabilities.windows import has_window, in_chunks
from trainer.config.dump import as_words, to_flow
from trainer.config.errors import UserError
from trainer.config.family import BLOCK_KEYS, LATENT, OF_SOME, PATTERN, facts_of, fixed, reads
from trainer.config.files import COMMAND_LINE
from trainer.config.flags import COMBINATIONS, FLAGS, flags_of
from trainer.config.keys import Config
from trainer.config.load import Loaded, load
from trainer.config.plain_yaml import describe, read_text
from trainer.config.resolve import resolve
from trainer.config.saved import read_saved
from trainer.config.schema import schema
from trainer.config.trust import code_of_checkpoint
from trainer.config.values import read_text as read_value
from trainer.models import FAMILIES
from trainer.models.families import loads_from
from trainer.models.mtp_names import MODULES

_ALWAYS = (
    *("decoder_block", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads"),
    *("base_num_decoder_layers", "vocab_size", "mlp_activations", "logits_via_embedding"),
    *("normalization_layer_epsilon", "attn_logits_soft_cap", "final_logits_soft_cap", "use_qk_norm"),
    *("attention_type", "rope_type", "rope_min_timescale", "rope_max_timescale", MODULES),
)
_OF_LONGROPE = ("rope_short_factor", "rope_long_factor")
_OF_ROPE = {
    "default": ("rope_linear_scaling_factor",),
    "llama3.1": (
        *("rope_factor", "original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
    ),
    "yarn": (
        *("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "rope_truncate"),
        "rope_attention_scaling",
    ),
    "longrope": ("rope_factor", "original_max_position_embeddings", "rope_attention_scaling", *_OF_LONGROPE),
}
# The keys of the feed-forward layers: an MLP, or experts.
_OF_MLP, _OF_EXPERTS = ("base_mlp_dim",), ("num_experts", "num_experts_per_tok", "base_moe_mlp_dim")
_SPARSITY = ("weight_sparsity_n", "weight_sparsity_m")
# The configuration keys of seldom used features, with their values in models without the feature: learned positions,
# fused projections, dense layers between sparse ones, another scale of attention scores, and weight masks.
_SELDOM = {
    **{"trainable_position_size": -1, "fused_qkv": False, "interleave_moe_layer_step": 1},
    **{"query_pre_attn_scalar": 0.0, "local_rope_max_timescale": -1},
    **dict.fromkeys(_SPARSITY),
}
_OF_HEADS = ("head_dim",)
_SCORES = ("query_pre_attn_scalar", "local_rope_max_timescale")  # they change the results, but not the parameters
# Maps a key to the keys whose effect depends on its value; these are not compared if the key itself differs.
_BELOW = {
    "rope_type": {name for names in _OF_ROPE.values() for name in names},
    "attention_type": {"sliding_window_size"},
}
# Keys that change the results, but not the parameters. All other keys determine the parameters, their shapes and their
# order; the checkpoint's values of these other keys always apply.
FREE = {
    *("normalization_layer_epsilon", "attn_logits_soft_cap", "final_logits_soft_cap", "normalize_embedding_logits"),
    *("attention_type", "rope_type", "rope_min_timescale", "rope_max_timescale", *_BELOW["rope_type"]),
    *("sliding_window_size", MODULES, "norm_topk_prob", "mscale", *_SCORES),
}
MODEL = {
    *_ALWAYS,
    *_OF_HEADS,
    *LATENT,
    *_OF_MLP,
    *_OF_EXPERTS,
    *OF_SOME,
    PATTERN,
    *BLOCK_KEYS,
    *_SELDOM,
    *FREE,
    *OF_STORED,
    "rope_interleave",
}


def described(config: Config) -> dict[str, Any]:
    """Returns the keys of the resolved `config` that define how its parameters are used. Omits keys without effect."""
    names = [*_ALWAYS, *_OF_ROPE[config.rope_type], *(_OF_EXPERTS if has_experts(config) else _OF_MLP)]
    names += [name for name in _SELDOM if _value(config, name) != _SELDOM[name]]
    names += LATENT if is_latent(config) else _OF_HEADS
    if is_latent(config) and config.rope_type == "yarn":
        names.append("mscale")
    names += [name for name in OF_SOME if reads(config, name)]
    if has_experts(config) and facts_of(config) is None:  # an unknown family, whose blocks may read all of these keys
        names += [name for name in (*OF_SOME, "norm_topk_prob") if config[name] != schema().keys[name].default]
    if config.n_routing_groups <= 1 and "topk_routing_group" in names:
        names.remove("topk_routing_group")
    if some_experts(config) and has_experts(config) and dense_layers(config):
        names += _OF_MLP
    if reads(config, "norm_topk_prob"):
        names.append("norm_topk_prob")
    unknown = facts_of(config) is None  # the blocks of an unknown family may read these keys
    names += [
        name
        for name in (PATTERN, *BLOCK_KEYS)
        if name not in _OF_LONGROPE
        and (reads(config, name) or (unknown and config[name] != schema().keys[name].default))
    ]
    if has_window(config) and not in_chunks(config):
        names.append("sliding_window_size")
    if config.logits_via_embedding:
        names.append("normalize_embedding_logits")
    if config.checkpoint_is_quantized:
        names += [name for name in OF_STORED if name != "quantize_router_proj" or has_experts(config)]
    return {name: _value(config, name) for name in names}


def _value(config: Config, name: str) -> Any:
    if name == "routed_score_func" and config[name] == "softmax":
        return ""  # the same meaning
    if name == "query_pre_attn_scalar" and config[name] == config.head_dim:
        return 0.0  # the same meaning
    value = config[name]
    return tuple(value) if isinstance(value, list | tuple) else value


def check_same_model(
    keys: Mapping[str, Any], config: Config, where: str, given: Collection[str] = (), say: Callable[[str], Any] = print
) -> None:
    """Compares a checkpoint's model keys (`described`) with the resolved configuration `config`.

    Keys in both `given` and `FREE` may differ; `say` receives a line for each. With rope_type=yarn, for example, a user
    extends the context of a model that was trained without YaRN. Keys that depend on a key that differs are not
    compared. Quantized weights can be read as floats: without checkpoint_is_quantized, their storage format is not
    compared. `decoder_block` may differ if the family of `config` loads parameters of the checkpoint's family
    (`families.loads_from`), and all keys that either family is known to read have equal values; `say` receives a line
    for this.

    Raises:
      UserError: lists every other key that differs, with the checkpoint's value.
    """
    ours = described(config)
    if config.checkpoint_is_quantized and not keys.get("checkpoint_is_quantized"):
        raise UserError(
            f"{where} contains float weights, but checkpoint_is_quantized=true; python -m trainer.quantize "
            "quantizes them"
        )
    keys = {name: value for name, value in keys.items() if name in ours or name not in OF_STORED}
    block, trained = config.decoder_block, keys.get("decoder_block", config.decoder_block)
    if other := trained != block and loads_from(block, trained):
        ours |= {name: _value(config, name) for name in keys.keys() - ours.keys()} | {"decoder_block": trained}
    free = FREE.intersection(given)
    if keys and not other:  # `described` omits keys with these values
        keys = {name: _SELDOM[name] for name in _SCORES if name in ours} | dict(keys)
    counting = [name for name in _BELOW if name in free and name in keys and ours[name] != keys[name]]
    # rope_interleave is not compared: the columns of queries and keys are reordered as needed.
    decided = {below for name in counting for below in _BELOW[name]} | {"rope_interleave"}
    differing = []
    for name in keys:
        if name in decided or ours.get(name) == keys[name]:
            continue
        if name in free:
            (theirs,), (given,) = as_words(keys, [name]), as_words(config, [name])
            say(f"{where} has {theirs}; {given} was given and takes precedence")
        else:
            differing.append(name)
    if differing:
        other = {"decoder_block": ", whose blocks may compute something else"}
        have = ", ".join(f"{as_words(config, [name])[0]}{other.get(name, '')}" for name in differing)
        raise UserError(
            f"{where} contains a different model than the configuration ({have}); "
            f"to load it, give: {' '.join(as_words(keys, differing))}"
        )
    unread = ours.keys() - keys.keys() - decided - {MODULES, *_SPARSITY}
    unread -= {name for name in OF_SOME if config[name] == schema().keys[name].default}  # default: not read
    if other and unread:
        raise UserError(
            f"{where} contains parameters of decoder_block={trained}, which does not read "
            f"{', '.join(as_words(ours, sorted(unread)))}; to load it with decoder_block={block}, leave these out"
        )
    if other:
        same = "computes the same" if block in FAMILIES else "must compute the same, which is not checked"
        say(
            f"{where} contains parameters of decoder_block={trained}; they are loaded with "
            f"decoder_block={block}, which {same}"
        )


def model_config(keys: Mapping[str, Any], words: Sequence[str], where: str) -> Any:
    """Returns the configuration that `load_model_keys` returns, resolved for one device."""
    return resolve(load_model_keys(keys, words, where).config, device_count=1, platform="cpu")


def load_model_keys(
    keys: Mapping[str, Any], words: Sequence[str], where: str, say: Callable[[str], Any] = print
) -> Loaded:
    """Returns the configuration that a checkpoint's keys `keys` and the arguments `words` define.

    If `words` contain checkpoint_is_quantized=false, quantized weights are read as floats.

    Checkpoints do not define the flags that select NNX or Linen, because parameters do not depend on them. The first
    of `COMBINATIONS` is used, unless `words` set the flags. `say`: see `check_same_model`.

    Raises:
      UserError: `keys` contradict each other; a key in `keys` names code to import, and `words` do not set that key; or
        `words`, or the preset that they select with model_name, contradict `keys`.
    """
    if asks_for_floats(words):
        keys = {name: value for name, value in keys.items() if name not in OF_STORED}
    resolved_alone(as_words(keys), where)
    # The checkpoint's keys come first: some arguments are valid only together with them.
    flags = as_words(flags_of(next(iter(COMBINATIONS))))
    given = [word.partition("=")[0] for word in words]
    if code := code_of_checkpoint(keys, given, where):
        raise UserError("\n  ".join(code))
    all_words = [*flags, *as_words(keys), *words]
    loaded = load(["base.yml", "dataset_type=synthetic", *all_words], defaults=without_rows(all_words))
    # The mesh and other arguments may need devices that this comparison does not have.
    of_model = [word for word in words if word.partition("=")[0] in {*MODEL, "model_name", "max_target_length", *FLAGS}]
    config = resolved_alone([*flags, *as_words(keys), *of_model])
    if "model_name" in given:
        # A preset does not define modules of multi-token prediction, but the checkpoint may have some.
        of_preset = {name: value for name, value in keys.items() if name != MODULES}
        check_same_model(of_preset, resolved_alone(of_model), where, say=lambda line: None)
    fixed = {name: value for name, value in keys.items() if name != MODULES or name not in given}
    check_same_model(fixed, config, where, say=say)
    return loaded


def check_words(keys: Mapping[str, Any], words: Sequence[str], config: Config, where: str) -> None:
    """Checks that each argument in `words` has an effect, and that `keys` and `words` define a model.

    `config`: the result of `model_config` for `keys` and `words`.

    Raises:
      UserError: an argument is not a model key, or has no effect on this model; or nothing defines the model.
    """
    given = [word.partition("=")[0] for word in words]
    hints = {"weight_dtype": "; dtype=... sets the dtype of the output"}
    lines = [
        f"{name}: not a key of the model{hints.get(name, '')}"
        for name in dict.fromkeys(given)
        if name not in {*MODEL, "model_name", "max_target_length", *FLAGS}
    ]
    idle = MODEL.intersection(given) - described(config).keys() - {"rope_interleave"}
    lines += [f"{name}: no effect on this model" for name in sorted(idle)]
    texts = {name: text for name, _, text in (word.partition("=") for word in words)}
    lines += [
        f"{name}={texts[name]}: decoder_block={config.decoder_block} always has {name}={to_flow(value)}"
        for name, value in fixed(config).items()
        if name in texts and read_value(schema().keys[name], texts[name]) != value
    ]
    if lines:
        raise UserError("\n  ".join([f"{where}: only the model's keys can be given:", *lines]))
    if not keys and not {*MODEL, "model_name"}.difference({"rope_interleave"}).intersection(given):
        raise UserError(f"{where}: this checkpoint does not contain its model's keys; give model_name=... or its keys")


def model_yaml(config: Config) -> str:
    """Returns the text of a YAML file that contains only the model's keys of the resolved `config`."""
    keys = described(config) | {"rope_interleave": config.rope_interleave}
    return "\n".join(["base_config: base.yml", *(f"{name}: {to_flow(value)}" for name, value in keys.items()), ""])


def read_model_yaml(path: Path) -> tuple[dict[str, Any], int | None]:
    """Reads the model's keys from a configuration next to a checkpoint. The data and the devices that the configuration
    names may be absent.

    Returns:
      The keys of `described` and `rope_interleave`; and the sequence length of training, if the file states it.

    Raises:
      UserError: the file is not a configuration, or a value is not allowed.
    """
    try:
        text = read_text(path)
    except yaml.YAMLError as error:
        raise UserError(describe(error, str(path))) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    found = read_saved(text, str(path))
    config = resolved_alone(as_words({name: found[name] for name in sorted(MODEL) if name in found}), str(path))
    return described(config) | {"rope_interleave": config.rope_interleave}, found.get("max_target_length")


def resolved_alone(words: Sequence[str], where: str = COMMAND_LINE) -> Any:
    """Returns the configuration that the arguments `words` define, resolved for one device, without data. Does not
    import the code that `words` name."""
    defaults = without_rows(words)
    loaded = load(["base.yml", "dataset_type=synthetic", *words], where, imports=False, defaults=defaults)
    return resolve(loaded.config, device_count=1, platform="cpu")
