"""Which keys say what function the parameters compute, and whether two sources say the same."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config import UserError, load, resolve
from trainer.config.dump import to_flow

_ALWAYS = (
    *("decoder_block", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim"),
    *("base_num_decoder_layers", "head_dim", "vocab_size", "mlp_activations", "logits_via_embedding"),
    *("normalization_layer_epsilon", "attn_logits_soft_cap", "final_logits_soft_cap", "use_qk_norm"),
    *("attention_type", "rope_type", "rope_min_timescale", "rope_max_timescale"),
)
_OF_ROPE = {
    "default": ("rope_linear_scaling_factor",),
    "llama3.1": (
        *("rope_factor", "original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
    ),
    "yarn": (
        *("rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "rope_truncate"),
        "rope_attention_scaling",
    ),
}
# How the columns of queries and keys are ordered. Not part of the function: it is converted as needed.
ORDER = "rope_interleave"


def described(config: Any) -> dict[str, Any]:
    """The keys of `config`, resolved, that say what its parameters compute, less those without effect."""
    names = [*_ALWAYS, *_OF_ROPE[config.rope_type]]
    if config.attention_type == "local_sliding":
        names.append("sliding_window_size")
    if config.logits_via_embedding:
        names.append("normalize_embedding_logits")
    return {name: tuple(config[name]) if name == "mlp_activations" else config[name] for name in names}


def check_same_model(
    keys: Mapping[str, Any], config: Any, where: str, given: Collection[str] = (), say: Callable[[str], Any] = print
) -> None:
    """Compares what a checkpoint says of its model with `config`, resolved.

    Keys in `given` may differ, with a line to `say`: whoever writes rope_type=yarn wants to stretch a model that was
    trained without it.

    Raises:
      UserError: every other key that differs, as the checkpoint has it.
    """
    ours = described(config)
    differing = []
    for name in keys:
        if name == ORDER or ours.get(name) == keys[name]:
            continue
        if name in given:
            say(f"{where} says {name}={_text(keys[name])}; {name}={_text(config[name])} was given and counts")
        else:
            differing.append(name)
    if differing:
        have = ", ".join(f"{name}={_text(config[name])}" for name in differing)
        raise UserError(
            f"{where} holds another model than the configuration ({have}); "
            f"to load it, give: {' '.join(as_words(keys, differing))}"
        )


def as_words(keys: Mapping[str, Any], names: Sequence[str] | None = None) -> list[str]:
    """`key=value` of `names` (default: all), as they stand on a command line."""
    return [f"{name}={_text(keys[name])}" for name in (keys if names is None else names)]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    return value if isinstance(value, str) else to_flow(value)


def model_config(keys: Mapping[str, Any], words: Sequence[str], where: str) -> Any:
    """The configuration, resolved for one device, of a checkpoint that says `keys`, with `words` of a command line.

    Raises:
      UserError: a word, or the preset that it names, says another model than `keys`.
    """
    config = _resolved([*as_words(keys), *words])
    if not keys:
        return config
    asked = load(["base.yml", "dataset_type=synthetic", *words])
    chosen = keys if asked.config.model_name != "default" else asked.changed
    check_same_model({name: keys[name] for name in keys if name in chosen}, _resolved(words), where)
    return config


def model_yaml(config: Any) -> str:
    """A yml that gives the model's keys of `config`, resolved, and leaves all others to base.yml."""
    keys = described(config) | {ORDER: config[ORDER]}
    return "\n".join(["base_config: base.yml", *(f"{name}: {to_flow(value)}" for name, value in keys.items()), ""])


def read_model_yaml(path: Path) -> dict[str, Any]:
    """The model's keys in a configuration beside a checkpoint: what `described` gives, and `rope_interleave`.

    Only the model counts: the data, the mesh and the platform that the file speaks of may not be here.
    """
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = [name for names in (_ALWAYS, *_OF_ROPE.values()) for name in names]
    names += ["sliding_window_size", "normalize_embedding_logits", ORDER]
    config = _resolved(as_words({name: found[name] for name in names if name in found}))
    return described(config) | {ORDER: config[ORDER]}


def _resolved(words: Sequence[str]) -> Any:
    loaded = load(["base.yml", "dataset_type=synthetic", *words])
    return resolve(loaded.config, device_count=1, platform="cpu")
