"""The declaration of a model family. Together with `config.family.Facts`, it fully describes the family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.config.keys import Config
from trainer.layers.norm import RMSNorm
from trainer.layers.stack import Stack
from trainer.models.huggingface import HuggingFace
from trainer.products.plain import Rules


class Named(NamedTuple):
    """MaxText's names of a parameter of a stack.

    Attributes:
      stacked: the name of the array of all layers.
      each: the names of the layers' arrays, if layers are not scanned.
      places: the length of a further axis of the stacked array, after that of the layers, on which MaxText stacks
        parameters that are separate here; 0: no such axis.
      place: the parameter's index on this axis.
    """

    stacked: str
    each: Sequence[str]
    places: int = 0
    place: int = 0


class Joined(NamedTuple):
    """A tensor of MaxText's layers that joins parameters along its last axis, or has other axes than our parameter.

    Attributes:
      parts: the parameters' paths in a layer, in order. `MaxText.names` returns the same names for all of them.
      shape: maps the shape of a part in a layer to its shape in the tensor; the order of the entries is the same.
      groups: the key for the number of groups of entries on the last axis, each with an equal share of every part in
        order; "": the parts follow one another.
    """

    parts: Sequence[str]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    groups: str = ""


@dataclass(frozen=True)
class MaxText:
    """Properties of MaxText's block of the same name.

    Attributes:
      scaled_queries: the end of the canonical names of query kernels that MaxText stores already multiplied by the
        factor on scores, unless `use_qk_norm`; "": MaxText multiplies scores by 1 / sqrt(head_dim).
      own_scale: whether MaxText computes the factor on scores in another way, which `refuses` then checks.
      stored: maps `(config, canonical name)` to (factor, offset): MaxText stores parameter / factor + offset.
      names: maps (canonical name of a stack's parameter, `families.Place`) to MaxText's names. None: the default of
        `weights.maxtext.stored`.
      joined: the tensors that join parameters, or have other axes than ours.
      pairs: whether RoPE rotates adjacent pairs under every rope_type.
      interleaves: whether YaRN rotates adjacent pairs in MaxText's presets of the family, as is MaxText's default.
      scales_windows: whether rope_linear_scaling_factor also scales RoPE in layers with a window.
      caps_scores: whether the block reads `attn_logits_soft_cap`.
      norms_heads: whether the block reads `use_qk_norm`.
      interleaves_experts: whether the block reads `interleave_moe_layer_step`.
      keys: further keys of this trainer that the block reads under the same name.
      more: returns, for a resolved configuration, the MaxText keys whose name or value differs from ours.
      refuses: returns `key=value: reason` for each value of a configuration that MaxText's block does not support.
    """

    scaled_queries: str = ""
    own_scale: bool = False
    stored: Callable[[Config, str], tuple[float, float]] = lambda config, name: (1.0, 0.0)
    names: Callable[[str, Any], Named] | None = None
    joined: Sequence[Joined] = ()
    pairs: bool = False
    interleaves: bool = True
    scales_windows: bool = True
    caps_scores: bool = False
    norms_heads: bool = False
    interleaves_experts: bool = False
    keys: Sequence[str] = ()
    more: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    refuses: Callable[[Config], Sequence[str]] = lambda config: ()


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
      stacks: maps a resolved configuration to the stacks of the decoder, in the order of the forward pass. A block is
        constructed as `block(config, rngs)` (Linen: `block(config)`) and called as `block(x, cache, context) -> x,
        cache` (`products.Context`, `layers.cache`). Sampling requires `init_cache(rows, length)`.
      forward_flops: maps `(config, keys)` to the FLOPs of the forward pass for one token, including modules of
        multi-token prediction, like `models.flops.forward_flops_per_token`. None: two FLOPs for each entry of a matrix;
        attention is not counted.
      projections: names of matrix products with weights (`jax.ad_checkpoint.checkpoint_name`) in the family's blocks,
        in addition to `capabilities.remat_tensors.PROJECTIONS`. A remat_policy that keeps all PROJECTIONS also keeps
        these.
      tensors: checkpoint names that the blocks give to other tensors. With remat_policy=custom, the keys
        custom_device_tensors and custom_offload_tensors select from these and from `projections`.
      axes: logical axes that base.yml's logical_axis_rules lack, each with its mesh axis or axes. The key
        logical_axis_rules cannot change them.
      products: maps a resolved configuration to the rules that choose the product of each matrix by its canonical name.
        The matrix of the output head may be the embedding table.
      embedding_scale: returns the factor on the embedded tokens; the head does not use it. None: 1.
      optional: canonical names, or prefixes of names, of parameters that a checkpoint may lack, as in
        ["decoder/layers/gate"]; see `models.optional`.
      norm: the class of the norms outside of the blocks, made as `norm(width, epsilon=, dtype=, weight_dtype=)`.
      hugging_face: the family's weights and keys in Hugging Face's format, one declaration per model type there; () if
        its checkpoints cannot be read or written.
      maxtext: the family's parameters in MaxText's format; None if its checkpoints cannot be read or written.
    """

    stacks: Callable[[Any], Sequence[Stack]]
    forward_flops: Callable[[Any, float | None], float] | None = None
    projections: Sequence[str] = ()
    tensors: Sequence[str] = ()
    axes: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    products: Callable[[Any], Rules] = lambda config: ()
    embedding_scale: Callable[[Config], float] | None = None
    optional: Sequence[str] = ()
    norm: Callable[..., Any] = RMSNorm
    hugging_face: Sequence[HuggingFace] = ()
    maxtext: MaxText | None = None
