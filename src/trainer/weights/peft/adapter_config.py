"""adapter_config.json of Hugging Face's PEFT. Checked against peft 0.21.2."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, shortened
from trainer.config.json_files import Field, field_problems, read_object, shown

CONFIG = "adapter_config.json"
_CHECKED = (0, 21)  # the version of peft whose fields are known

_NAMES = Field(str, null=True, many=True)
_FIELDS = {
    "peft_type": Field(str),
    "r": Field(int, 1, 1 << 20),
    "lora_alpha": Field(float, 1e-6),
    "lora_dropout": Field(float, 0, 1, null=True),
    "use_rslora": Field(bool, null=True),
    "bias": Field(str, null=True),
    "modules_to_save": _NAMES,
    "target_modules": _NAMES,
    "target_parameters": _NAMES,
    "base_model_name_or_path": Field(str, null=True),
    "rank_pattern": Field(dict, null=True),
    "alpha_pattern": Field(dict, null=True),
}
# Fields that may affect an adapter's initial values or the choice of matrices, but not how its tensors are used. The
# linear layers of all known models are torch.nn.Linear, for which peft ignores fan_in_fan_out.
_WITHOUT_EFFECT = (
    *("alora_config", "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_ga_config", "megatron_core", "merge_weights", "peft_version", "qalora_group_size"),
    *("revision", "runtime_config", "task_type"),
)
# Fields that must be absent, null, false, 0 or empty, with the unsupported features that they enable.
_REFUSED = {
    "use_dora": "DoRA: it also scales each output",
    "rank_pattern": "ranks that differ between matrices",
    "alpha_pattern": "scales that differ between matrices",
    "lora_bias": "a bias in addition to the product of the adapter",
    "layer_replication": "layers that repeat layers of the base",
    "trainable_token_indices": "trained rows of the embedding table",
    "alora_invocation_tokens": "Activated LoRA: it is active only after certain tokens",
    "use_qalora": "QA-LoRA: its inputs are means of groups of inputs",
    "use_bdlora": "products that are diagonal in blocks",
    "arrow_config": "a router between several adapters",
    "kasa_config": "a matrix between the two matrices of the adapter",
    "monteclora_config": "random adapters",
    "velora_config": "another gradient",
    "megatron_config": "layers of Megatron",
    "enable_lora": "adapters of parts of a matrix, from the first versions of peft",
}
# Values of init_lora_weights that leave the base unchanged. With other values, peft
# subtracts the initial adapter from the base.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# The rank_pattern that peft writes for experts in transformers 5 if adapters were requested by module names of
# transformers 4: transformers 5 merges gate_proj and up_proj, so these two share one adapter, which has twice the rank
# and the same scale.
_FUSED = r".*\.gate_up_proj"


class PeftConfig:
    """An adapter_config.json.

    Attributes:
      rank: the rank of every adapter once it is read; adapters that have rank `least` in the file are padded with
        zeros.
      least: r in the file: the rank of adapters to which no rank_pattern applies.
      alpha: `rank` times the scale of the product.
      base: base_model_name_or_path, or "".
      modules: modules_to_save.
      targets: the names in target_modules; () if it is a pattern or does not list exactly the adapted
        modules.
      biases: whether biases were trained.
      multiples: rank_pattern, whose ranks are multiples of `rank` and which only merged modules may have; {} if there
        is none.
      notes: lines about settings that are changed or ignored.
    """

    def __init__(self, path: Path):
        """Raises UserError, which lists all fields that are invalid or cannot be represented."""
        self._where = str(path)
        data = read_object(path)
        if (kind := data.get("peft_type")) != "LORA":
            raise UserError(f"{path}: peft_type={shown(kind)}: only adapters of the type LORA can be read")
        if wrong := field_problems(data, _FIELDS):
            raise UserError("\n  ".join([f"{path}: values that are not allowed:", *wrong]))
        self.least = rank = int(data.get("r", 8))
        factor = 2 if _is_fused(data, rank) else 1
        self.rank = rank * factor
        alpha = float(data.get("lora_alpha", 8))
        self.alpha = (alpha * math.sqrt(rank) if data.get("use_rslora") else alpha) * factor
        self.base = data.get("base_model_name_or_path") or ""
        self.modules = _listed(data.get("modules_to_save"))
        targets = data.get("target_modules")
        hidden = isinstance(targets, str) or data.get("exclude_modules") or factor > 1
        self.targets = () if hidden else tuple(targets or ())
        self.multiples = {} if factor > 1 else data.get("rank_pattern") or {}
        self.biases = data.get("bias") not in (None, "none")
        ignored = ("rank_pattern", "alpha_pattern") if factor > 1 or _same_scale(data, rank) else ()
        if refused := _problems(data, ignored):
            raise UserError("\n  ".join([f"{path}: cannot be represented here:", *refused]))
        self.notes = self._notes(data)

    def _notes(self, data: Mapping[str, Any]) -> list[str]:
        notes = []
        if data.get("lora_dropout"):
            notes.append(f"lora_dropout={data['lora_dropout']}: training continues without dropout on adapters' inputs")
        if self.rank > self.least:
            notes.append(
                f"adapters of experts have rank {self.rank}; others, of rank {self.least}, are padded with zeros"
            )
        if unknown := _unknown(data):
            notes.append(f"unknown fields, ignored as in peft: {', '.join(map(shortened, unknown))}")
        return [f"{self._where}: {note}" for note in notes]


def _is_fused(data: Mapping[str, Any], rank: int) -> bool:
    ranks, alphas = data.get("rank_pattern"), data.get("alpha_pattern")
    twice = {_FUSED: 2 * rank}, {_FUSED: 2 * data.get("lora_alpha", 8)}
    return (ranks, alphas) == twice and not data.get("use_rslora")


def _same_scale(data: Mapping[str, Any], rank: int) -> bool:
    """Returns whether all ranks in rank_pattern are multiples of `rank`, and alpha_pattern gives them the scale of the
    other adapters. This trainer writes merged modules in this way. If a module that is not merged has such a rank, the
    check of tensor shapes fails later."""
    ranks, alphas = data.get("rank_pattern") or {}, data.get("alpha_pattern") or {}
    whole = all(isinstance(it, int) and it > 0 and it % rank == 0 for it in ranks.values())
    alpha = data.get("lora_alpha", 8)
    return whole and alphas == {name: it // rank * alpha for name, it in ranks.items()} and not data.get("use_rslora")


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _problems(data: Mapping[str, Any], ignored: Sequence[str]) -> list[str]:
    refused = [
        f"{name}={shown(data[name])}: {why}" for name, why in _REFUSED.items() if data.get(name) and name not in ignored
    ]
    start = data.get("init_lora_weights", True)
    if not any(start is known or (isinstance(start, str) and start == known) for known in _PLAIN_STARTS):
        refused.append(
            f"init_lora_weights={shown(start)}: the adapter belongs to a base that this initialization changed; save "
            "it with peft's save_pretrained(..., path_initial_model_for_weight_conversion=...), which converts it"
        )
    if (unknown := _unknown(data)) and _version(data) > _CHECKED:
        refused += [
            f"{shortened(name)}={shown(data[name])}: not known; the file was written by a later peft than "
            f"{'.'.join(map(str, _CHECKED))}"
            for name in unknown
        ]
    return refused


def _unknown(data: Mapping[str, Any]) -> list[str]:
    """Returns the fields with a value that peft's version `_CHECKED` does not know; peft also ignores such fields."""
    return [name for name, value in data.items() if value and name not in {*_FIELDS, *_WITHOUT_EFFECT, *_REFUSED}]


def _version(data: Mapping[str, Any]) -> tuple[int, ...]:
    words = str(data.get("peft_version") or "0").split(".")[:2]
    return tuple(int(word) if word.isdecimal() else _CHECKED[1] + 1 for word in words)


def config_fields(
    base: str,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    parameters: Sequence[str],
    saved: Sequence[str],
    tied: bool,
) -> dict[str, Any]:
    """Returns the content of an adapter_config.json. Its fields exist since peft 0.7, except those for `parameters` and
    `tied`.

    Args:
      base: base_model_name_or_path.
      targets: target_modules.
      parameters: target_parameters.
      saved: modules_to_save.
      tied: whether `saved` contains the embedding table and the head, and these are tied.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "target_modules": list(targets),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **({"target_parameters": list(parameters)} if parameters else {}),
        **({"ensure_weight_tying": True} if tied else {}),
    }
