"""Quantized matrices stored by other programs (tests/packed, see scripts/write_packed.py), and random matrices."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_cases import (
    FAMILIES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    hf_tensors_of,
    random_params,
    shapes_of,
    write_hf,
)
from safetensors.numpy import load_file, save_file

from trainer.config.errors import UserError
from trainer.weights.contents import contents_of
from trainer.weights.huggingface.packed import with_matrices
from trainer.weights.huggingface.packed_matrix import PackedMatrix
from trainer.weights.huggingface.quantization_config import Recipe, Scheme, recipe
from trainer.weights.huggingface.quantized_kernels import _part, stored_keys
from trainer.weights.huggingface.safetensors_file import file_metadata, stored_tensors
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source

FOLDER = Path(__file__).parents[2] / "packed"
CASES = sorted(path.stem for path in FOLDER.iterdir())
assert len(CASES) == 15
ORDERED = "gptq-int4-ordered"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}


def recipe_of(said):
    refused = []
    found = recipe({"quantization_config": said}, refused)
    assert not refused
    return found


def refusals(said):
    refused = []
    recipe({"quantization_config": said}, refused)
    assert all(line.startswith("quantization_config: ") for line in refused)
    return "\n".join(refused)


def compressed(form="pack-quantized", **changes):
    group = {"targets": ["Linear"], "weights": INT4, **changes}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def golden(case):
    """Returns a golden matrix, and its values as computed by the program that wrote it."""
    file = FOLDER / f"{case}.safetensors"
    found = recipe_of(json.loads(file_metadata(file)["quantization_config"]))
    tensors = with_matrices(stored_tensors(file), found, file)
    assert tensors.keys() == {"m.weight", "values"}
    return tensors["m.weight"], tensors["values"].all_values()


def boxes(shape, seed):
    """Returns the box of the whole matrix, and random boxes."""
    rng = np.random.default_rng(seed)
    starts = [[int(rng.integers(0, size)) for size in shape] for _ in range(20)]
    ends = [[int(rng.integers(start + 1, size + 1)) for start, size in zip(it, shape, strict=True)] for it in starts]
    cuts = [tuple(map(slice, *it)) for it in zip(starts, ends, strict=True)]
    return [tuple(slice(0, size) for size in shape), *cuts]


def expanded(tiles, block, shape):
    """Returns an array with one value per weight."""
    return np.repeat(np.repeat(tiles, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_the_values_of_the_program_that_wrote_it(case):
    matrix, values = golden(case)
    assert matrix.shape == values.shape
    for box in boxes(values.shape, len(case)):
        np.testing.assert_array_equal(matrix.read(box).astype(values.dtype), values[box])


@pytest.mark.parametrize("case", [case for case in CASES if case != ORDERED])
def test_codes_and_scales_make_up_the_values(case):
    matrix, values = golden(case)
    codes, scales, zeros = matrix.parts(boxes(values.shape, 0)[0])
    assert codes.dtype == ("float8_e4m3fn" if matrix.kind_of_codes == "fp8" else "int8")
    # 4-bit integers stored in one byte each count as int8.
    kind = {"int4-plain": "int8", "awq": "int4"}.get(case, case.removeprefix("gptq-").split("-")[0])
    assert matrix.kind_of_codes == kind
    assert np.abs(codes.astype(np.float32)).max() <= {"int4": 8, "int8": 128, "fp8": 448}[kind]
    assert (zeros is not None) == ("asymmetric" in case or case.startswith(("gptq", "awq")))
    spread = [expanded(it, matrix.block, values.shape) for it in (scales, 0 * scales if zeros is None else zeros)]
    meant = (codes.astype(np.float32) - spread[1]) * spread[0]
    np.testing.assert_array_equal(meant.astype(values.dtype), values)
    # A part has the scales of the blocks with which it overlaps.
    box = (slice(3, 5), slice(7, 9))
    tiles = tuple(slice(c.start // b, -(-c.stop // b)) for c, b in zip(box, matrix.block, strict=True))
    np.testing.assert_array_equal(matrix.parts(box)[0], codes[box])
    np.testing.assert_array_equal(matrix.parts(box)[1], scales[tiles])


@pytest.mark.parametrize(("inputs", "alike"), [(7, True), (8, True), (9, False)])
def test_one_scale_for_all_inputs_is_one_block_if_they_are_few(inputs, alike):
    def matrix(shape, columns):
        scheme = Scheme("int8", (1, columns), "plain")
        return [PackedMatrix("", SimpleNamespace(shape=shape), None, None, None, (1, columns), scheme, FOLDER)]

    matrices = {
        "decoder/layers/mlp/wi_0/kernel": matrix((6, 16), 8),
        "decoder/layers/mlp/wo/kernel": matrix((4, inputs), inputs),
    }
    found = stored_keys(None, matrices, [])
    assert found.get("weight_block_size") == ((8, 1) if alike else None)


@pytest.mark.parametrize("tiles", [(2, 2), (6, 4), (2, 4)])
def test_a_scale_is_that_of_each_tile_of_its_block(tiles):
    """A kernel [6 inputs, 4 outputs] may store more scales than the matrix, for example if the matrix has only one."""
    scales = np.arange(4, dtype=np.float32).reshape(2, 2)  # for blocks of 2 outputs and 3 inputs
    matrix = SimpleNamespace(shape=(4, 6), block=(2, 3), scales_and_zeros=lambda box: (scales, None))
    found = _part("", matrix, SimpleNamespace(inputs=1), "scale", (6, 4), tiles, 0)
    assert found.shape == tiles
    each = [size // count for size, count in zip((6, 4), tiles, strict=True)]
    np.testing.assert_array_equal(expanded(found, each, (6, 4)), expanded(scales, matrix.block, (4, 6)).T)


def test_scales_of_activations_are_left_out(tmp_path):
    file = FOLDER / "int8-plain.safetensors"
    names = [f"{of}_{it}" for of in ("input", "output", "q", "k", "v", "kv") for it in ("scale", "zero_point")]
    more = {f"m.{name}": np.ones(1, np.float32) for name in (*names, "activation_scale")}
    said = json.loads(file_metadata(file)["quantization_config"])
    save_file({name: it.all_values() for name, it in stored_tensors(file).items()} | more, tmp_path / "file")
    found = with_matrices(stored_tensors(tmp_path / "file"), recipe_of(said), tmp_path)
    assert found.keys() == {"m.weight", "values"}


def test_inputs_in_the_order_of_activations_have_no_blocks():
    matrix, values = golden(ORDERED)
    with pytest.raises(UserError, match=r"m\.weight: its groups are in the order of activations"):
        matrix.parts(boxes(values.shape, 0)[0])


def words_of(values, order):
    """Packs 4-bit unsigned integers [n, m] into int32 [n, ceil(m / 8)]; `order`: which integer is at each position."""
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // 8)), np.int64)
    for row in range(rows):
        for column in range(columns):
            word, place = divmod(column, 8)
            words[row, word] |= int(values[row, column]) << 4 * order.index(place)
    return words.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("layout", ["packed", "gptq", "gptq_v2", "gptqmodel", "awq"])
def test_random_sizes_and_groups(layout, tmp_path):
    rng = np.random.default_rng(len(layout))
    straight = list(range(8))
    for number in range(6):
        out, into = (int(it) for it in rng.integers(1, 6, 2) * (1 if layout == "packed" else 8))
        group = int(rng.integers(1, into + 3))
        count = -(-into // group)
        codes, zeros = rng.integers(0, 16, (out, into)), rng.integers(0, 16, (out, count))
        scales = rng.uniform(0.1, 2, (out, count)).astype(np.float16)
        if layout == "packed":
            scheme = Scheme("int4", (1, group), "packed", zeros=True)
            tensors = {"weight_packed": words_of(codes, straight), "weight_shape": np.array([out, into])}
            tensors |= {"weight_scale": scales, "weight_zero_point": words_of(zeros.T, straight).T}
        elif layout == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            scheme = Scheme("int4", (1, group), "awq")
            tensors = {"qweight": words_of(codes.T, order), "qzeros": words_of(zeros.T, order), "scales": scales.T}
        else:
            said = {"quant_method": "gptq", "bits": 4, "group_size": group, "checkpoint_format": layout}
            if layout == "gptqmodel":
                said |= {"checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:4.0"]}}
            scheme = recipe_of(said).schemes["Linear"]
            less = (zeros - 1) % 16 if layout == "gptq" else zeros
            stored = words_of(less.T, straight)
            if layout == "gptqmodel":  # a zero point of 0 borrows from the next zero point
                stored = (stored.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
            tensors = {"qweight": words_of(codes, straight).T, "qzeros": stored, "scales": scales.T}
        file = tmp_path / str(number)
        save_file({f"m.{name}": np.ascontiguousarray(it) for name, it in tensors.items()}, file)
        matrix = with_matrices(stored_tensors(file), Recipe({"Linear": scheme}), file)["m.weight"]
        meant = codes - expanded(zeros, (1, group), codes.shape)
        meant = meant.astype(np.float32) * expanded(scales.astype(np.float32), (1, group), codes.shape)
        for box in boxes(codes.shape, number):
            np.testing.assert_array_equal(matrix.read(box), meant[box])


def changed(case, tmp_path, **changes):
    """Returns the error message about a golden file with changed tensors; None removes a tensor."""
    file = FOLDER / f"{case}.safetensors"
    tensors = {name: it.all_values() for name, it in stored_tensors(file).items()}
    tensors |= {f"m.{name}": it for name, it in changes.items()}
    save_file({name: it for name, it in tensors.items() if it is not None}, tmp_path / "file")
    found = recipe_of(json.loads(file_metadata(file)["quantization_config"]))

    def read():
        matrix = with_matrices(stored_tensors(tmp_path / "file"), found, tmp_path)["m.weight"]
        matrix.read(boxes(matrix.shape, 0)[0])

    with pytest.raises(UserError) as error:
        read()
    return str(error.value)


def test_tensors_that_do_not_fit(tmp_path):
    words, shape = np.zeros((12, 4), np.int32), np.array([12, 32])
    assert "\n  m.weight_scale: missing" in changed("int4-group", tmp_path, weight_scale=None)
    assert "\n  m.weight_shape: missing" in changed("int4-group", tmp_path, weight_shape=None)
    assert "\n  m.weight_packed: missing" in changed("int4-group", tmp_path, weight_packed=None)
    assert "\n  m.weight_zero_point: missing" in changed("int4-group-asymmetric", tmp_path, weight_zero_point=None)
    assert "\n  m.qzeros: missing" in changed("awq", tmp_path, qzeros=None)
    assert "\n  m.scales: missing" in changed("gptq-int8", tmp_path, scales=None)
    message = changed("int4-group", tmp_path, weight_packed=words.astype(np.int64))
    assert "m.weight_packed: stored as I64, wanted I32" in message
    assert "m.weight_shape: contains [12, 24]" in changed("int4-group", tmp_path, weight_shape=shape - [0, 8])
    assert "m.weight_shape: contains [-12, 32]" in changed("int4-group", tmp_path, weight_shape=shape * [-1, 1])
    scales = np.ones((12, 3), np.float32)
    assert "m.weight_scale: found [12, 3], wanted [12, 2]" in changed("int4-group", tmp_path, weight_scale=scales)
    assert "m.qzeros: found [12, 4], wanted [2, 4]" in changed("awq", tmp_path, qzeros=words)
    assert "m.weight: found [0, 4], wanted two axes" in changed("int8-plain", tmp_path, weight=np.zeros((0, 4), "i1"))
    groups = np.full(32, 4, np.int32)
    assert "m.weight: the groups of its inputs are not in [0, 1]" in changed("gptq-int4", tmp_path, g_idx=groups)


def of_gptq(folder, bits, said, stored, **more):
    """Returns a matrix [16, 16] with two groups of 8 and stored zero points `stored`, for both or per group."""
    said = {"quant_method": "gptq", "bits": bits, "group_size": 8} | said
    each = [stored] * 2 if isinstance(stored, int) else stored
    words = np.array([[sum(one << bits * i for i in range(32 // bits))] for one in each], np.uint32).view(np.int32)
    tensors = {"qweight": np.zeros((16 * bits // 32, 16), np.int32), "scales": np.ones((2, 16), np.float16), **more}
    tensors["qzeros"] = np.repeat(words, 16 * bits // 32, axis=1)
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, folder / "file")
    return with_matrices(stored_tensors(folder / "file"), recipe_of(said), folder)["m.weight"]


V1, V2 = {"checkpoint_format": "gptq", "sym": True}, {"checkpoint_format": "gptq_v2", "sym": True}


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_that_are_stored_as_the_other_format_has_them(bits, tmp_path):
    middle = 2 ** (bits - 1)
    writer = {"meta": {"quantizer": ["gptqmodel:4.0"]}}
    for said, stored in ((V1, middle - 1), ({"sym": True}, middle - 1), (V1 | writer, middle - 1), (V2, middle)):
        matrix = of_gptq(tmp_path, bits, said, stored)
        assert (matrix.read(boxes(matrix.shape, 0)[0]) == -middle).all()
        assert not matrix.has_zeros
    for said, stored, other in (
        (V1, middle, "gptq_v2"),
        ({"sym": True}, middle, "gptq_v2"),
        (V1 | writer, middle, "gptq_v2"),
        (V2, middle - 1, "gptq"),
    ):
        matrix = of_gptq(tmp_path, bits, said, stored)
        message = rf"m\.weight: its zero points are stored in the {other} format.* to {other}$"
        for read in (matrix.read, matrix.parts):
            with pytest.raises(UserError, match=message):
                read(boxes(matrix.shape, 0)[0])
        with pytest.raises(UserError, match=message):
            _ = matrix.has_zeros
        assert of_gptq(tmp_path, bits, said | {"sym": False}, stored).has_zeros  # zero points may be intended here
    with pytest.raises(UserError, match=r"m\.weight: it has zero points, but .* excludes them"):
        _ = of_gptq(tmp_path, bits, V1, 3).has_zeros
    with pytest.raises(UserError, match=r"m\.weight: it has zero points, but .* excludes them"):
        _ = of_gptq(tmp_path, bits, V1, [middle, 3]).has_zeros


def test_groups_of_gptq_that_contradict_its_configuration(tmp_path):
    with pytest.raises(UserError, match=r"\n  m\.g_idx: missing"):
        of_gptq(tmp_path, 4, {"desc_act": True}, 7)
    for said, groups in (({"desc_act": True}, np.arange(16) % 2), ({}, np.arange(16) // 8)):
        matrix = of_gptq(tmp_path, 4, V1 | said, 7, g_idx=groups.astype(np.int32))
        assert (matrix.read(boxes(matrix.shape, 0)[0]) == -8).all()
    matrix = of_gptq(tmp_path, 4, V1, 7, g_idx=(np.arange(16) > 8).astype(np.int32))
    with pytest.raises(UserError, match=r"m\.weight: 9 inputs are in one group, but config\.json says group_size=8"):
        matrix.read((slice(0, 1), slice(15, 16)))
    ordered = compressed(weights=INT4 | {"actorder": "group"})
    file = FOLDER / "int4-group.safetensors"
    with pytest.raises(UserError, match=r"\n  m\.weight_g_idx: missing"):
        with_matrices(stored_tensors(file), recipe_of(ordered), file)


@pytest.mark.parametrize("case", ["awq", "int4-plain"])
def test_zero_points_of_a_symmetric_matrix(case, tmp_path):
    file = FOLDER / f"{case}.safetensors"
    tensors = {name: it.all_values() for name, it in stored_tensors(file).items() if name != "values"}
    said = json.loads(file_metadata(file)["quantization_config"]) | ({"zero_point": False} if case == "awq" else {})
    name = {"awq": "m.qzeros", "int4-plain": "m.weight_zero_point"}[case]
    none = np.full((2, 4), -0x77777778, np.int32) if case == "awq" else np.zeros((6, 2), np.int8)
    for zeros, fits in ((none, True), (none + 1, False)):
        save_file(tensors | {name: zeros}, tmp_path / "file")
        matrix = with_matrices(stored_tensors(tmp_path / "file"), recipe_of(said), tmp_path)["m.weight"]
        if fits:
            assert not matrix.has_zeros
            continue
        with pytest.raises(UserError, match=r"m\.weight: it has zero points, but .* excludes them"):
            matrix.read(boxes(matrix.shape, 0)[0])


def test_a_file_that_was_truncated_after_it_was_opened(tmp_path):
    file = tmp_path / "file"
    file.write_bytes((FOLDER / "int8-plain.safetensors").read_bytes())
    found = recipe_of(json.loads(file_metadata(file)["quantization_config"]))
    matrix = with_matrices(stored_tensors(file), found, file)["m.weight"]
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match="the file ends within its tensors"):
        matrix.read(boxes(matrix.shape, 0)[0])


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            {"quant_method": "bitsandbytes"},
            'quant_method="bitsandbytes" is not read .*; load the folder with transform',
        ),
        ({"quant_method": "hqq"}, 'quant_method="hqq"'),
        ({"bits": 4}, "quant_method=null"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'checkpoint_format="marlin"'),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic="),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version="gemv"'),
        ({"quant_method": "awq", "bits": 8}, "bits=8"),
        (compressed("nvfp4-pack-quantized"), 'group_0: format="nvfp4-pack-quantized" is not read'),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
        (compressed() | {"transform_config": {"config_groups": {}}}, "transform_config="),
        (compressed() | {"config_groups": {}}, "no config_groups"),
        (compressed() | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16=.*not an object"),
        (compressed(weights=INT4 | {"num_bits": 3}), "3 bits of type int"),
        (compressed(weights=INT4 | {"num_bits": "4"}), 'num_bits="4", not an integer'),
        (compressed(weights=INT4 | {"strategy": "tensor_group"}), "strategy=tensor_group"),
        (compressed(weights=INT4 | {"strategy": "block"}), "block_structure=null"),
        (compressed(targets=["re:("]), r"target re:\("),
        (compressed(targets=["re:" + "x" * 201]), "more than 200 characters"),
        (compressed(targets=["re:x{0,100}"]), "a repetition count of more than 2 digits"),
        (compressed(targets=["re:a(?!b)c"]), "are allowed only at its beginning"),
        (compressed(targets=["re:(?!a)b|c"]), "alternatives next to an assertion"),
        (compressed(targets=["re:(?!a"]), r"missing \)"),
        (compressed() | {"ignore": [f"re:{i}" for i in range(5000)]}, "5,000 regular expressions, more than 100"),
        (compressed() | {"config_groups": {str(i): {} for i in range(100_000)}}, "100,000 config_groups"),
    ],
)
def test_what_is_refused_by_name(said, words):
    assert re.search(words, refusals(said))


def test_targets():
    byte = INT4 | {"num_bits": 8}
    groups = {
        "a": {"targets": ["Linear"], "weights": INT4},
        "b": {"targets": ["re:.*down_proj"], "weights": byte | {"group_size": 8}},
        "c": {"targets": ["m.1.down_proj"], "weights": byte | {"group_size": 4}},
        "d": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}},
    }
    said = compressed() | {"config_groups": groups, "ignore": ["lm_head", "re:.*gate$"]}
    found = recipe_of(said)
    names = ("m.0.up_proj", "m.0.down_proj", "m.1.down_proj", "lm_head", "m.0.gate", "m.0.gate_proj")
    schemes = found.schemes_of(names)
    assert [scheme and scheme.block[1] for scheme in schemes] == [16, 8, 4, None, None, 16]
    assert recipe({"compression_config": {k: v for k, v in said.items() if k != "quant_method"}}, []) == found
    assert recipe({"quantization_config": None}, []) is None


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (".?" * 90 + "Q", []),
        ("(a*)*" * 30 + "Q", []),
        (r".*mlp\.gate$", [1]),
        (r"model\.layers\.\d+\..*", [0, 1, 2]),
        (r"^(?!.*vision).*(q_proj|v_proj)$", [0]),
        (r"(?=model)(?!.*[)]|.*\(|.*gate)model", [0, 2]),
        (r".*\.(q_proj|v_proj)", [0, 2, 4]),
        ("lm_head", [3]),
    ],
)
def test_patterns_match_as_in_python_and_in_linear_time(pattern, matched):
    names = ["layers.0.q_proj", "layers.12.mlp.gate", "layers.1.vision.v_proj"]
    names = [*(f"model.{name}" for name in names), "lm_head", "x.q_proj_x", "\ud800"]
    if "?" * 2 not in pattern and "Q" not in pattern:
        assert [i for i, name in enumerate(names) if re.match(pattern, name)] == matched
    schemes = recipe_of(compressed() | {"ignore": [f"re:{pattern}"]}).schemes_of(names)
    assert [i for i, scheme in enumerate(schemes) if scheme is None] == matched


def test_a_matrix_that_no_target_matches(tmp_path):
    file = FOLDER / "int4-group.safetensors"
    for said in (compressed(targets=["LlamaMLP"]), compressed() | {"ignore": ["re:m"]}):
        with pytest.raises(UserError, match="\n  m: quantized, but no target of quantization_config matches it"):
            with_matrices(stored_tensors(file), recipe_of(said), file)


def quarters(matrix):
    """Quantizes a matrix to int4 codes with a scale per group of 8 inputs.

    Returns the codes, the scales and the dequantized matrix.
    """
    groups = matrix.reshape(len(matrix), -1, 8)
    scales = np.abs(groups).max(2) / np.float32(7)
    codes = np.round(groups / scales[..., None]).astype(np.int8)
    return codes.reshape(matrix.shape), scales, (codes * scales[..., None]).reshape(matrix.shape).astype(np.float32)


def test_a_folder_of_experts(tmp_path):
    config = config_of(decoder_block="qwen3_moe", **FAMILIES["qwen3_moe"])
    stored, meant = {}, {}
    for name, tensor in hf_tensors(random_params(config)).items():
        meant[name] = tensor
        if tensor.ndim < 2 or "_proj" not in name:
            stored[name] = tensor
            continue
        codes, scales, meant[name] = quarters(tensor)
        stored[f"{name}_packed"] = words_of(codes + 8, list(range(8)))
        stored |= {f"{name}_scale": scales, f"{name}_shape": np.array(codes.shape)}
        stored[name.replace("weight", "input_scale")] = np.ones(1, np.float32)
    said = compressed(weights=INT4 | {"group_size": 8}, input_activations={"num_bits": 8}) | {"ignore": ["lm_head"]}
    path = write_hf(tmp_path / "int4", config, stored, shards=2, quantization_config=said)
    lines = []
    load_parameters(str(path), config, abstract_of(config), lines.append)
    count = sum(name.endswith("_packed") for name in stored)
    note = (
        f"{count} matrices are stored as int4 in groups of 8; they are read as float32; activations are not quantized"
    )
    assert f"{path}: {note}" in lines
    assert contents_of(str(path)).notes == (f"{path}: {note.replace('are read as float32', 'stay quantized')}",)
    plain = write_hf(tmp_path / "plain", config, meant)
    pair = [open_source(str(it)).leaves(config, shapes_of(config)) for it in (path, plain)]
    for name, leaf in pair[0].items():
        other = pair[1][name].read(np.dtype(np.float32), lambda _: None)
        np.testing.assert_array_equal(leaf.read(np.dtype(np.float32), lambda _: None), other)


def test_merged_matrices(tmp_path):
    """Several parameters in one matrix are read as floats and in stored form, and written back unchanged."""
    config = config_of(decoder_block="phi3", **FAMILIES["phi3"])
    stored, meant = {}, {}
    for name, tensor in hf_tensors_of(config, random_params(config)).items():
        stored[name] = meant[name] = tensor
        if tensor.ndim == 2 and "_proj" in name:
            codes, scales, meant[name] = quarters(tensor)
            del stored[name]
            stored[f"{name}_packed"] = words_of(codes + 8, list(range(8))).view(np.int32)
            stored |= {f"{name}_scale": scales, f"{name}_shape": np.array(codes.shape)}
    said = compressed(weights=INT4 | {"group_size": 8}) | {"ignore": ["lm_head"]}
    path = write_hf(tmp_path / "int4", config, stored, quantization_config=said)
    plain = write_hf(tmp_path / "plain", config, meant)
    pair = [open_source(str(it)).leaves(config, shapes_of(config)) for it in (path, plain)]
    for name, leaf in pair[0].items():
        other = pair[1][name].read(np.dtype(np.float32), lambda _: None)
        np.testing.assert_array_equal(leaf.read(np.dtype(np.float32), lambda _: None), other)
    source = open_source(str(path))
    assert source.keys["quantization"] == "int4"
    kept = model_config(source.keys, [], str(path))
    (tmp_path / "back").mkdir()
    write_huggingface(tmp_path / "back", kept, source.leaves(kept, shapes_of(kept)), None)
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), stored)
    ignored = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head"]


def test_biases_of_zeros_beside_matrices_of_gptq(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    straight, stored, meant = list(range(8)), {}, {}
    for name, tensor in hf_tensors(random_params(config)).items():
        if "_proj" not in name:
            stored[name] = meant[name] = tensor
            continue
        codes, scales, meant[name] = quarters(tensor)
        module = name.removesuffix(".weight")
        words = {"qweight": words_of(codes + 8, straight).T, "qzeros": words_of(scales.T * 0 + 7, straight)}
        words |= {"scales": scales.T, "g_idx": np.arange(codes.shape[1], dtype=np.int32) // 8}
        words["bias"] = np.zeros(len(codes), np.float16)
        stored |= {f"{module}.{last}": np.ascontiguousarray(it) for last, it in words.items()}
    said = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    path = write_hf(tmp_path / "gptq", config, stored, quantization_config=said)
    plain = write_hf(tmp_path / "plain", config, meant)
    pair = [open_source(str(it)).leaves(config, shapes_of(config)) for it in (path, plain)]
    for name, leaf in pair[0].items():
        other = pair[1][name].read(np.dtype(np.float32), lambda _: None)
        np.testing.assert_array_equal(leaf.read(np.dtype(np.float32), lambda _: None), other)
    stored[f"{module}.bias"][0] = 1
    path = write_hf(tmp_path / "other", config, stored, quantization_config=said)
    with pytest.raises(UserError, match=rf"{module}\.bias: the model has no such parameter"):
        open_source(str(path)).leaves(config, shapes_of(config))
