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
    """The names of the MaxText arrays that store a parameter of one of our stacks.

    Attributes:
      stacked: the name of the array that stacks all layers.
      each: the name of each layer's array, used if layers are not scanned.
      places: the length of an additional axis of the stacked array, after the layer axis. On this axis MaxText stacks
        parameters that are separate arrays in this trainer. 0: no such axis.
      place: the parameter's index on the additional axis.
    """

    stacked: str
    each: Sequence[str]
    places: int = 0
    place: int = 0


class Joined(NamedTuple):
    """A tensor of a MaxText layer that joins several of our parameters along its last axis, or that stores one of our
    parameters with a different shape.

    Attributes:
      parts: the parameters' paths in a layer, in order. `MaxText.names` returns the same names for all of them.
      shape: maps a parameter's shape in one of our layers to its shape in the tensor. The order of the entries is the
        same in both.
      groups: the configuration key for the number of groups into which the last axis is divided. Each group contains an
        equal share of every parameter, in order. "": the parameters are concatenated.
    """

    parts: Sequence[str]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    groups: str = ""


@dataclass(frozen=True)
class MaxText:
    """The properties of MaxText's block for a family (the block with the same decoder_block).

    Attributes:
      scaled_queries: the end of the canonical names of the query kernels. MaxText stores these kernels multiplied by
        the attention scale, unless `use_qk_norm` is set. "": MaxText multiplies scores by 1 / sqrt(head_dim).
      own_scale: whether MaxText applies an attention scale other than 1 / sqrt(head_dim) without storing it in the
        query kernels. If so, `refuses` must refuse scales that MaxText does not support.
      stored: maps `(config, canonical name)` to (factor, offset), where MaxText stores parameter / factor + offset.
      names: maps the canonical name of a stack's parameter and its `models.families.Place` to MaxText's names. None:
        the default names, which `weights.maxtext.stored` defines.
      joined: the tensors that join several of our parameters or have a different shape; see `Joined`.
      pairs: whether RoPE rotates adjacent pairs for every rope_type.
      interleaves: whether YaRN rotates adjacent pairs in MaxText's presets of the family. This is MaxText's default.
      scales_windows: whether rope_linear_scaling_factor also scales RoPE in layers with a window.
      caps_scores: whether the block reads `attn_logits_soft_cap`.
      norms_heads: whether the block reads `use_qk_norm`.
      interleaves_experts: whether the block reads `interleave_moe_layer_step`.
      keys: further configuration keys that MaxText's block reads under the same name.
      more: maps a resolved configuration to the values of the MaxText keys whose name or value differs from ours.
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
        cache`; see `products.context` and `layers.cache`. For sampling, it must have a method `init_cache(rows,
        length)`.
      forward_flops: maps `(config, keys)` to the FLOPs of the forward pass for one token, including multi-token
        prediction modules. `models.flops.forward_flops_per_token` documents the arguments. None: each entry of a matrix
        counts as two FLOPs, and attention is not counted.
      projections: names (`jax.ad_checkpoint.checkpoint_name`) of the products with weight matrices in the family's
        blocks, in addition to `config.capabilities.remat_tensors.PROJECTIONS`. A remat_policy that keeps all
        PROJECTIONS also keeps these.
      tensors: names (`checkpoint_name`) of other tensors in the blocks. With remat_policy=custom, the keys
        custom_device_tensors and custom_offload_tensors select from `tensors` and `projections`.
      axes: maps logical axes that are missing from base.yml's logical_axis_rules to one or more mesh axes. The key
        logical_axis_rules cannot override this map.
      products: maps a resolved configuration to the rules that select each matrix's product implementation by the
        matrix's canonical name. If the output head is tied, its matrix is the embedding table.
      embedding_scale: returns the factor by which token embeddings are multiplied; a tied head uses the unscaled table.
        None: the factor is 1.
      optional: canonical names, or prefixes of names, of parameters that a checkpoint may omit, such as
        ["decoder/layers/gate"]; see `models.optional`.
      norm: the class of the norms outside of the blocks, constructed as `norm(width, epsilon=, dtype=, weight_dtype=)`.
      hugging_face: the family in Hugging Face's format, one declaration per model type in transformers; () if
        checkpoints in this format are neither read nor written.
      maxtext: the family in MaxText's format; None if checkpoints in this format are neither read nor written.
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
