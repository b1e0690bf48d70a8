"""Splits tensors that bundle all experts of a layer, for families whose layouts have one tensor for each expert.

In transformers 5, `gate_up_proj` of a layer's experts is [experts, 2 hidden, width]: for each expert, the rows of
`gate_proj` followed by those of `up_proj`. `down_proj` is [experts, width, hidden].
"""

from collections.abc import Mapping

from trainer.config.limits import EXPERTS
from trainer.models.huggingface import EXPERT, HuggingFace
from trainer.weights.huggingface.safetensors_file import DTYPES, StoredTensor

# The matrices that a bundled tensor contains, by the last component of the tensor's name.
_BUNDLES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_EACH = f".experts.{EXPERT}.gate_proj.weight"


def with_experts(tensors: Mapping[str, StoredTensor], hf: HuggingFace) -> dict[str, StoredTensor]:
    """Returns `tensors`, by name, with each bundled tensor replaced by one tensor for each expert and matrix, if the
    layouts of `hf` expect one tensor for each expert. Bundled tensors of unexpected shape are kept. Reads no values."""
    found = dict(tensors)
    if not any(layout.name.endswith(_EACH) for layout in hf.layouts.values()):
        return found
    for name, tensor in tensors.items():
        above, _, last = name.rpartition(".")
        each = _each(above, tensor, _BUNDLES[last]) if last in _BUNDLES and above.endswith(".experts") else {}
        if each and tensors.keys().isdisjoint(each):
            del found[name]
            found |= each
    return found


def _each(above: str, tensor: StoredTensor, parts: tuple[str, ...]) -> dict[str, StoredTensor]:
    """Returns the matrices in `tensor`; {} if its shape is unexpected. `above`: the prefix of the matrices' names."""
    if tensor.kind not in DTYPES or len(tensor.shape) != 3 or not tensor.nbytes:
        return {}
    experts, rows, columns = tensor.shape
    if experts > EXPERTS or rows % len(parts):
        return {}
    names = [f"{above}.{e}.{part}.weight" for e in range(experts) for part in parts]
    nbytes = tensor.nbytes // len(names)
    shape = (rows // len(parts), columns)
    return {
        name: StoredTensor(tensor.path, tensor.kind, shape, tensor.start + i * nbytes, nbytes)
        for i, name in enumerate(names)
    }
