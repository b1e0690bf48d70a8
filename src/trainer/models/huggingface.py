"""Types with which a family declares its format in Hugging Face's transformers: its tensors and config.json.

Each family's module contains its declaration.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.limits import MODULES
from trainer.models.gguf import Gguf

EXPERT = "<expert>"  # placeholder for the expert's number in the name of a tensor


LAYER = "model.layers.{}."  # the prefix of the names of a layer's tensors
EACH = 0  # see `Merged.groups`
_SAME = {"softmax": ""}  # maps a value of routed_score_func to an equivalent value


class Layout(NamedTuple):
    """The tensors of one parameter in a Hugging Face checkpoint.

    Attributes:
      name: the name of the tensor, with {} for the number of the layer. If the name contains `EXPERT`, each expert has
        a separate tensor, and the first axis of our parameter in one layer is the expert. All other attributes then
        describe the parameter of one expert.
      inputs: the number of leading axes of our kernel that are inputs. If it is positive, the tensor is a matrix
        [out, in]. 0: the tensor has our parameter's shape, unless `flat` or `swapped` is set.
      rotated: "" if RoPE rotates no entries. Otherwise the last axis of our parameter is one or more consecutive heads,
        and `rotated` is the configuration key for the number of entries in a head, such as "head_dim". RoPE rotates
        pairs of entries: Hugging Face stores the first entries of all pairs before the second entries; this trainer
        stores the entries of a pair side by side if `rope_interleave` is set.
      flat: whether the tensor merges all of our axes into one.
      swapped: whether the last two axes are swapped: the tensor is [experts, out, in] for our matrices [experts, in,
        out] of all experts. `swapped` cannot be combined with `inputs`, `rotated` or `EXPERT`.
      depthwise: whether the parameter is the kernel of a depthwise convolution, [width, ...channels], and the tensor is
        [channels, 1, width]. `depthwise` requires inputs = 1.
    """

    name: str
    inputs: int = 0
    rotated: str = ""
    flat: bool = False
    swapped: bool = False
    depthwise: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert has a separate tensor."""
        return EXPERT in self.name

    def of_adapter(self) -> tuple["Layout", "Layout"]:
        """Returns the layouts of the matrices a [*in, r] and b [r, *out] of a low-rank adapter of this matrix. PEFT
        stores them as [r, in] and [out, r]."""
        module = self.name.removesuffix(".weight")
        a, b = (f"{module}.lora_{which}.weight" for which in "AB")
        return self._replace(name=a, rotated=""), self._replace(name=b, inputs=1)

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one layer's tensor, given our parameter's shape in one layer."""
        if self.flat:
            return (math.prod(ours),)
        if self.swapped:
            return (*ours[:-2], *ours[:-3:-1])
        middle = (1,) if self.depthwise else ()
        return (math.prod(ours[self.inputs :]), *middle, math.prod(ours[: self.inputs])) if self.inputs else ours

    def head(self, config: Config, shape: tuple[int, ...]) -> int:
        """Returns the number of entries in a head on the last axis of our parameter; 0 if RoPE rotates no entries.
        `shape`: the shape of our parameter.

        Raises:
          UserError: the last axis does not consist of complete heads.
        """
        head = config[self.rotated] if self.rotated else 0
        if head and shape[-1] % head:
            raise UserError(
                f"{self.name}: by its Layout, RoPE rotates heads of {self.rotated}={head} entries, but the length of "
                f"our parameter's last axis, {shape[-1]}, is not a multiple"
            )
        return head

    def widened(self, shape: tuple[int, ...], box: tuple[slice, ...], head: int) -> tuple[slice, ...]:
        """Returns a box of our parameter that contains `box`, consists of complete heads, and corresponds to
        a single box of the tensor. A box is a tuple of one slice for each axis.

        `shape`: the shape of our parameter in one layer. `head`: the number of entries in a head on the last axis; 0:
        there are no heads.
        """
        outer = {0, self.inputs} if self.inputs or self.flat else set(range(len(shape)))
        wide = [cut if axis in outer else slice(0, shape[axis]) for axis, cut in enumerate(box)]
        if head:
            wide[-1] = slice(wide[-1].start // head * head, -(-wide[-1].stop // head) * head)
        return tuple(wide)

    def box(self, shape: tuple[int, ...], box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the box of the tensor that corresponds to `box`, a result of `widened` for the same `shape`."""
        if self.flat:
            rows = math.prod(shape[1:])
            return (slice(box[0].start * rows, box[0].stop * rows),)
        if self.swapped:
            return (*box[:-2], *box[:-3:-1])
        if not self.inputs:
            return box
        rows, columns = math.prod(shape[self.inputs + 1 :]), math.prod(shape[1 : self.inputs])
        out, into = box[self.inputs], box[0]
        middle = (slice(0, 1),) if self.depthwise else ()
        return (slice(out.start * rows, out.stop * rows), *middle, slice(into.start * columns, into.stop * columns))

    def to_ours(self, theirs: np.ndarray, shape: tuple[int, ...], head: int) -> np.ndarray:
        """Converts `theirs`, one layer's tensor or a box of it, to our layout. `shape`: the result's shape. `head`: the
        number of entries in a head, which are reordered into adjacent pairs; 0: no reordering."""
        if self.swapped:
            return np.stack([transposed(matrix) for matrix in theirs])
        theirs = theirs[:, 0] if self.depthwise else theirs
        return reordered((transposed(theirs) if self.inputs else theirs).reshape(shape), head, pairs=True)

    def to_theirs(self, ours: np.ndarray, head: int) -> np.ndarray:
        """Converts `ours`, one layer of our parameter, to the layer's tensor: the inverse of `to_ours`."""
        if self.swapped:
            return np.stack([transposed(matrix) for matrix in ours])
        ours = reordered(ours, head, pairs=False)
        if self.inputs:
            matrix = transposed(ours.reshape(math.prod(ours.shape[: self.inputs]), -1))
            return matrix[:, None] if self.depthwise else matrix
        return ours.reshape(-1) if self.flat else ours


class Outer(NamedTuple):
    """A multimodal model in transformers whose text model belongs to a family.

    Attributes:
      model_type: the model's name in transformers.
      texts: the allowed model types of `text_config`; the first is the default.
      towers: the name prefixes of tensors outside of the text model; transformers 5 may prepend "model.".
      fields: the fields of config.json that configure only parts outside of the text model.
      tokens: the fields of config.json that contain the ids of placeholder tokens for images and other content, with
        their defaults in transformers.
      tied: the default of tie_word_embeddings in transformers.
    """

    model_type: str
    texts: Sequence[str]
    towers: Sequence[str]
    fields: Sequence[str]
    tokens: Mapping[str, int]
    tied: bool


class Merged(NamedTuple):
    """A module of a Hugging Face checkpoint whose tensors merge the tensors of several modules along the output axis.

    The merged modules are called parts. `Layout`s name the parts as if each part had separate tensors.

    Attributes:
      name: the end of the module's name, as in "self_attn.qkv_proj".
      parts: the ends of the parts' names, in order, as in ("self_attn.q_proj", ...).
      groups: the number of groups into which the outputs are divided, or the configuration key for this number. Each
        group contains an equal share of every part, in order. 1: the parts are concatenated. `EACH`: the parts' outputs
        alternate one by one.
      axis: the output axis: 0 in a matrix [out, in] or a bias; -1 in a tensor of all experts [e, in, out].
    """

    name: str
    parts: Sequence[str]
    groups: int | str = 1
    axis: int = 0

    def of(self, config: Config) -> "Merged":
        """Returns the declaration with the number of groups resolved from `config`."""
        return self._replace(groups=config[self.groups]) if isinstance(self.groups, str) else self

    def find(self, tensor: str) -> tuple[str, int] | None:
        """Returns the name of the merged tensor and the index of the part, given the name of a part's tensor; None if
        the tensor does not belong to a part of this module."""
        for i, part in enumerate(self.parts):
            before, found, after = f".{tensor}.".partition(f".{part}.")
            if found:
                return f"{before}.{self.name}.{after}"[1:-1], i
        return None

    def fits(self, sizes: Sequence[int]) -> bool:
        """Returns whether each part can be divided equally among the groups. `sizes`: each part's number of outputs."""
        return not any(size % self._count(sizes[0]) for size in sizes)

    def cut(self, sizes: Sequence[int], i: int) -> np.ndarray:
        """Returns the indices of part i's outputs in the merged tensor, given each part's number of outputs."""
        groups = self._count(sizes[0])
        first = np.arange(groups)[:, None] * (sum(sizes) // groups) + sum(sizes[:i]) // groups
        return (first + np.arange(sizes[i] // groups)).ravel()

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the merged tensor of `parts`."""
        axis = self.axis % parts[0].ndim
        groups = self._count(parts[0].shape[axis])
        each = [part.reshape(*part.shape[:axis], groups, -1, *part.shape[axis + 1 :]) for part in parts]
        return np.concatenate(each, axis + 1).reshape(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])

    def _count(self, size: int) -> int:
        assert isinstance(self.groups, int), self.groups
        return self.groups or size


class Modules(NamedTuple):
    """The tensors of multi-token prediction modules in a Hugging Face checkpoint.

    In names, {} is the module's number, which continues the numbering of the model's layers. The default values
    describe DeepSeek-V3's layout.

    Attributes:
      above: the prefix of the names of tensors outside of a module's block.
      block: the prefix of the names of a block's tensors, in place of `LAYER`.
      names: the names of the embedding norm, the hidden-state norm, the projection and the final norm.
      field: the field of config.json with the number of modules.
      most: the maximum number of modules.
    """

    above: str = LAYER
    block: str = LAYER
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    field: str = "num_nextn_predict_layers"
    most: int = MODULES

    def number(self, layers: int, tensors: Mapping[str, Any]) -> int:
        """Returns the number of modules in `tensors`, the tensors of a model with `layers` layers."""
        names = (f"{self.above.format(layers + i)}{self.names[2]}.weight" for i in range(self.most))
        return next((i for i, name in enumerate(names) if name not in tensors), self.most)


class HuggingFace(NamedTuple):
    """A family in Hugging Face's transformers.

    Attributes:
      model_type, architecture: the family's names in transformers.
      layouts: the layout of each parameter, by canonical name.
      merged: the checkpoint's modules that each merge several of the modules named in `layouts`.
      defaults: the values that fields have if they are absent from config.json.
      nested: further defaults for fields in the `text_config` of a multimodal model's config.json. When transformers 4
        writes this file, it omits fields whose value is the default of the text model's configuration class.
      outers: the multimodal models that contain this text model.
      qk_norm: whether the family normalizes queries and keys. If a field of config.json determines this, `sizes` maps
        use_qk_norm to the field.
      window: which layers have a sliding window. "": no layer; "given": every layer, unless sliding_window is null;
        "switched": layer max_window_layers and all later layers, if use_sliding_window is true; "alternating": all but
        every n-th layer, as layer_types specifies; "read": `read` determines the layers.
      period: n for "alternating" if layer_types is absent. `period_field`: the field of config.json that overrides n.
      ropes: the types of RoPE that the family supports, as named in config.json; (): all but longrope.
      rope_sizes: maps further numeric keys of this trainer to the field of config.json's RoPE object that has the same
        value.
      rope_ignored: fields of the RoPE object that transformers does not read.
      partial: whether RoPE may rotate a part of each head (partial_rotary_factor).
      local_rope: "" if RoPE is the same in all layers. Otherwise, the field of config.json with the base of RoPE in
        layers with a window. RoPE is not scaled in these layers.
      epsilon: the field with the epsilon of norms.
      activation: the field with the gate's activation. `activations`: maps further values of the field to our names.
      whole_heads: whether hidden_size must be a multiple of the number of heads.
      sizes: maps further keys of this trainer to the field of config.json with the same value. If the field is null,
        the key has its default. attention_bias and mlp_bias must be false in families that do not list them here.
      powers: maps further keys to (field, exponent). The key's value is the field, which must be positive, to the power
        of the exponent: {"logits_multiplier": ("logits_scaling", -1)} divides logits by logits_scaling. If the field is
        null, the key has its default.
      latent: whether attention is multi-head latent attention. `whole_heads_of_latents` determines the meaning of
        head_dim in the config.json of such a family. True: head_dim is the size of a whole head, and
        partial_rotary_factor is the share of a head that RoPE rotates. False: head_dim is the size of the rotated part.
      only: maps fields to the only value that this trainer can represent. The fields may also be absent or null.
      off: fields that must be absent, null, false or 0, and are not written.
      ignored: fields that transformers does not read in this family.
      read: returns further keys of this trainer with their values. The first argument contains the fields of
        config.json, completed by `defaults`. The second argument is a list to which `read` appends messages about
        values that this trainer cannot represent. `fields`: the fields that `read` reads. `write`: maps a resolved
        configuration to the values of these fields.
      implies: maps keys of this trainer to their value in every model of this type.
      aliases: other model types with the same fields and tensors.
      modules: maps name components that differ between transformers 5 and checkpoints: a component of a module's
        name to the one in tensor names, such as {"mlp": "block_sparse_moe"}.
      methods: config.json's topk_method without groups of experts, and with groups. ("", ""): the family has no groups.
      mtp: the tensors of multi-token prediction modules.
      gguf: the declaration of the family's GGUF files; None if these are neither read nor written.
    """

    model_type: str
    architecture: str
    layouts: Mapping[str, Layout]
    defaults: Mapping[str, Any]
    merged: Sequence[Merged] = ()
    qk_norm: bool = False
    window: Literal["", "given", "switched", "alternating", "read"] = ""
    period: int = 0
    period_field: str = ""
    ropes: Sequence[str] = ()
    rope_sizes: Mapping[str, str] = {}
    rope_ignored: Sequence[str] = ()
    partial: bool = False
    local_rope: str = ""
    epsilon: str = "rms_norm_eps"
    activation: str = "hidden_act"
    activations: Mapping[str, str] = {}
    whole_heads: bool = False
    sizes: Mapping[str, str] = {}
    powers: Mapping[str, tuple[str, float]] = {}
    only: Mapping[str, Any] = {}
    off: Sequence[str] = ()
    ignored: Sequence[str] = ()
    read: Callable[[Mapping[str, Any], list[str]], Mapping[str, Any]] = lambda said, refused: {}
    fields: Sequence[str] = ()
    write: Callable[[Config], Mapping[str, Any]] = lambda config: {}
    latent: bool = False
    whole_heads_of_latents: bool = False
    implies: Mapping[str, Any] = {}
    aliases: Sequence[str] = ()
    modules: Mapping[str, str] = {}
    methods: tuple[str, str] = ("", "")
    nested: Mapping[str, Any] = {}
    outers: Sequence[Outer] = ()
    mtp: Modules = Modules()
    gguf: Gguf | None = None

    def in_gguf(self) -> "HuggingFace":
        """Returns this declaration with the layouts of a GGUF file, under Hugging Face names."""
        return self._replace(layouts={**self.layouts, **(self.gguf.layouts if self.gguf else {})})

    def contradicted(self, config: Config) -> list[str]:
        """Returns the keys of `implies` whose value in `config` differs."""
        return [key for key, value in self.implies.items() if _SAME.get(config[key], config[key]) != value]


def transposed(matrix: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy of `matrix.T`.

    Copies strips that fill complete cache lines, which is five times as fast as NumPy's copy.
    """
    result = np.empty(matrix.shape[::-1], matrix.dtype)
    unsigned = f"u{matrix.dtype.itemsize}"  # as integers, because NumPy copies bfloat16 entry by entry
    source, target = matrix.view(unsigned), result.view(unsigned)
    for row in range(0, matrix.shape[0], 16):
        target[:, row : row + 16] = source[row : row + 16].T
    return result


def reordered(x: Any, head: int, *, pairs: bool) -> Any:
    """Reorders the entries of the heads on the last axis of `x` (NumPy or JAX).

    `head`: the number of entries in a head; 0: `x` is returned unchanged. `pairs`: whether a head
    (a_0 ... a_n, b_0 ... b_n) becomes (a_0, b_0, ... a_n, b_n); false applies the inverse reordering.
    """
    if not head:
        return x
    halves = (2, head // 2) if pairs else (head // 2, 2)
    return x.reshape(*x.shape[:-1], -1, *halves).swapaxes(-1, -2).reshape(x.shape)
