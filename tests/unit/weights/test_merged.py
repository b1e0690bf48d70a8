"""`models.huggingface.Merged`: which outputs of a merged tensor belong to which parameter, and the names of both."""

import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.models.huggingface import EACH, EXPERT, Merged
from trainer.weights.huggingface.merged import scheme_of_whole, stored_name, whole_shapes, wholes, with_parts
from trainer.weights.huggingface.quantization_config import Scheme
from trainer.weights.huggingface.safetensors_file import TensorPart

QKV = Merged("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
IN_TURN = Merged("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), groups=EACH)
OF_ALL = Merged("experts.gate_up_proj", ("experts.gate", "experts.up"), groups=EACH, axis=-1)


class Held:
    """A tensor that counts the entries that are read."""

    kind, entries = "F32", 0

    def __init__(self, value):
        self.value, self.shape, self.dtype = value, value.shape, value.dtype

    def read(self, box):
        self.entries += self.value[box].size
        return self.value[box]


@pytest.mark.parametrize(
    ("how", "names", "sizes", "expected"),
    [
        (QKV, "a.self_attn.{}_proj.weight", {"q": 4, "k": 2, "v": 2}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (QKV, "a.self_attn.{}_proj.bias", {"q": 2, "k": 1, "v": 1}, [0, 1, 2, 3]),
        (IN_TURN, "a.mlp.{}_proj.weight", {"gate": 3, "up": 3}, [0, 3, 1, 4, 2, 5]),
        (OF_ALL, "a.mlp.experts.{}", {"gate": 2, "up": 2}, [0, 2, 1, 3]),
    ],
)
def test_parts_are_read_and_joined(how, names, sizes, expected):
    """Entries are numbered consecutively over the parts; `expected` lists their order in the merged tensor."""
    first = np.cumsum([0, *sizes.values()])
    axes = 1 if names.endswith("bias") else 2 if how is not OF_ALL else 3
    other = (3,) * (axes - 1)
    shapes = {names.format(name): (*other, n) if how.axis else (n, *other) for name, n in sizes.items()}
    parts = {}
    for (name, shape), start in zip(shapes.items(), first[:-1], strict=True):
        numbers = np.arange(start, start + shape[how.axis], dtype=np.float32)
        parts[name] = np.moveaxis(np.broadcast_to(numbers, (*other, len(numbers))), -1, how.axis)
    whole = how.joined([*parts.values()])
    (name,) = {stored_name(part, [how]) for part in parts}
    assert whole_shapes(shapes, [how]) == {name: whole.shape}
    np.testing.assert_array_equal(np.moveaxis(whole, how.axis, 0).reshape(len(expected), -1)[:, 0], expected)
    held = Held(whole)
    found = with_parts({name: held, "b": None}, shapes, [how])
    assert found.keys() == {*parts, "b"}
    for part, value in parts.items():
        box = tuple(slice(0, size) if i else slice(size // 2, size) for i, size in enumerate(value.shape))
        assert (found[part].shape, found[part].dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(found[part].read(box), value[box])
    # Reading an interleaved part includes the entries between its own.
    assert held.entries <= (1 if how.groups == 1 else 2) * whole.size


def test_names():
    assert stored_name("model.layers.3.self_attn.k_proj.lora_B.weight", [QKV]).endswith(
        "3.self_attn.qkv_proj.lora_B.weight"
    )
    assert (
        stored_name("model.layers.3.self_attn.o_proj.weight", [QKV, IN_TURN])
        == "model.layers.3.self_attn.o_proj.weight"
    )
    of_one = Merged("gate_up_proj", ("gate_proj", "up_proj"))
    assert stored_name(f"a.experts.{EXPERT}.up_proj.weight", [of_one]) == f"a.experts.{EXPERT}.gate_up_proj.weight"
    assert stored_name("a.experts.my_up_proj.weight", [of_one]) == "a.experts.my_up_proj.weight"


def test_a_declaration_that_does_not_fit_the_layouts():
    with pytest.raises(UserError, match=r"a\.self_attn\.qkv_proj\.weight: .* parts self_attn\.v_proj, but no Layout"):
        wholes({"a.self_attn.q_proj.weight": (2, 2), "a.self_attn.k_proj.weight": (2, 2)}, [QKV])
    with pytest.raises(UserError, match=r"groups=0, which do not divide parts of \[2, 4\] outputs"):
        wholes({"a.mlp.gate_proj.weight": (2, 2), "a.mlp.up_proj.weight": (4, 2)}, [IN_TURN])


def test_a_tensor_of_another_size_stays():
    shapes = {"a.mlp.gate_proj.weight": (3, 2), "a.mlp.up_proj.weight": (3, 2)}
    name = "a.mlp.gate_up_proj.weight"
    assert with_parts({name: Held(np.zeros((5, 2)))}, shapes, [IN_TURN]).keys() == {name}


def test_quantized_parts_of_one_matrix():
    row, blocks, whole = (
        Scheme("int4", (1, 8), "packed"),
        Scheme("fp8", (4, 4), "plain"),
        Scheme("fp8", (0, 0), "plain"),
    )
    assert scheme_of_whole("a", [(None, 8), (None, 4)], True) is None
    assert scheme_of_whole("a", [(row, 8), (row, 3)], False) == row
    assert scheme_of_whole("a", [(blocks, 8), (blocks, 3)], True) == blocks
    assert scheme_of_whole("a", [(whole, 8)], True) == whole
    for parts, concatenated, why in (
        ([(row, 8), (None, 8)], True, "its parts are stored in different ways"),
        ([(blocks, 7), (blocks, 8)], True, "4 outputs share a scale"),
        ([(blocks, 8), (blocks, 8)], False, "4 outputs share a scale"),
        ([(whole, 8), (whole, 8)], True, "all outputs share a scale"),
    ):
        with pytest.raises(UserError, match=f"a: cannot be written quantized: {why}.*give dtype=float32"):
            scheme_of_whole("a", parts, concatenated)


def test_a_part_of_a_part():
    held = Held(np.arange(12).reshape(6, 2))
    part = TensorPart(TensorPart(held, 0, np.arange(0, 6, 2)), 0, np.arange(1, 3))
    np.testing.assert_array_equal(part.read((slice(0, 2), slice(1, 2))), [[5], [9]])
