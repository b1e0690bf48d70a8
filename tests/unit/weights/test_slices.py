"""Weights are read in slices: only a device's part of one layer, with the same bits as the whole tensor."""

import itertools

import jax
import numpy as np
import pytest
from checkpoint_cases import (
    BFLOAT16,
    FAMILIES,
    assert_same,
    config_of,
    hf_tensors,
    hf_tensors_of,
    in_pairs,
    maxtext_params,
    random_params,
    write_hf,
    write_maxtext,
)
from support import arguments

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves import orbax
from trainer.leaves.source import Leaf, names_of
from trainer.models.families import hugging_face
from trainer.models.huggingface import EXPERT
from trainer.training.build import build
from trainer.weights.huggingface import read as hf
from trainer.weights.huggingface.merged import with_parts
from trainer.weights.huggingface.safetensors_file import StoredTensor, stored_tensors
from trainer.weights.load import load_parameters
from trainer.weights.params.write import write_params

MESH = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "per_device_batch_size": 1}


def on_eight_devices(**keys):
    """Returns a configuration, and its parameters as abstract arrays that are sharded over eight devices."""
    run = build(load(arguments("nnx", **MESH, **keys)).config, jax.devices())
    return run.config, run.codec.unpack(run.abstract_args()[0]).params


def assert_loaded(path, config, abstract, params):
    result = load_parameters(str(path), config, abstract, print)
    assert_same(result, params)
    for name, array in names_of(result).items():
        assert array.sharding == names_of(abstract)[name].sharding


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("block", FAMILIES)
def test_any_box_of_a_parameter_is_read_as_it_is(tmp_path, block, interleave):
    config = config_of(decoder_block=block, **FAMILIES[block])
    params = random_params(config, BFLOAT16)
    write_hf(tmp_path / "hf", config, hf_tensors_of(config, params))
    tensors = stored_tensors(tmp_path / "hf/model.safetensors")
    parts = {name: tensor.shape for name, tensor in hf_tensors(params).items()}
    tensors = with_parts(tensors, parts, hugging_face(config).merged)
    for name, value in (in_pairs(params) if interleave else params).items():
        layout = hugging_face(config).layouts[name]
        ours, name_there = (value[1], layout.name.format(1)) if "{}" in layout.name else (value, layout.name)
        if layout.of_experts:
            ours, name_there = ours[2], name_there.replace(EXPERT, "2")
        head = layout.head(config, ours.shape) if interleave else 0
        cuts = [[(0, n), (0, n // 2), (n // 2, n), (n - 1, n)] for n in ours.shape]
        for ends in itertools.product(*cuts):
            box = tuple(slice(*pair) for pair in ends)
            found = hf._read(tensors[name_there], layout, ours.shape, box, head)
            assert found.tobytes() == ours[box].tobytes(), (name, box)


@pytest.fixture
def reads(monkeypatch):
    """Records the bytes of each read of a tensor, and of each read of a file."""
    slices, strips, read, fromfile = [], [], StoredTensor.read, np.fromfile

    def seen(tensor, box):
        values = read(tensor, box)
        slices.append(values.nbytes)
        return values

    def seen_strip(path, dtype, count, offset):
        strips.append(count * dtype.itemsize)
        return fromfile(path, dtype, count, offset=offset)

    monkeypatch.setattr(StoredTensor, "read", seen)
    monkeypatch.setattr(np, "fromfile", seen_strip)
    return slices, strips


def test_no_read_is_larger_than_a_devices_slice_of_a_layer(tmp_path, monkeypatch, reads):
    monkeypatch.setattr("trainer.weights.huggingface.safetensors_file._STRIP", 256)
    config, abstract = on_eight_devices(decoder_block="mistral", base_num_decoder_layers=5, logits_via_embedding=False)
    params = random_params(config)
    path = write_hf(tmp_path / "hf", config, hf_tensors(params))
    assert_loaded(path, config, abstract, params)
    held = {}
    for name, leaf in names_of(abstract).items():
        layers = leaf.shape[0] if "layers/" in name else 1
        shard = np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4
        boxes = set(map(str, leaf.sharding.devices_indices_map(leaf.shape).values()))
        held[name] = [shard // layers] * layers * len(boxes)
    slices, strips = reads
    assert sorted(slices) == sorted(itertools.chain(*held.values())), "each slice once, replicas together"
    assert max(slices) * 8 == max(np.prod(leaf.shape[-2:]) for leaf in names_of(abstract).values()) * 4
    row = max(tensor.shape[-1] * 4 for tensor in stored_tensors(path / "model.safetensors").values())
    assert max(strips) <= max(256, row)


@pytest.mark.parametrize("scanned", [True, False])
def test_maxtext_on_eight_devices(tmp_path, scanned, monkeypatch):
    """Large leaves are read in slices, small ones whole."""
    monkeypatch.setattr(orbax, "_SMALL", 0 if scanned else orbax._SMALL)
    config, abstract = on_eight_devices(decoder_block="llama2", rope_interleave=True, logits_via_embedding=False)
    params = random_params(config)
    stored = maxtext_params(config, params, scanned=scanned)
    # The query's factor sqrt(head_dim) is applied and removed in float32, starting from the stored values.
    query = "decoder/layers/self_attention/query/kernel"
    wanted = in_pairs(params)
    scale = np.float32(config.head_dim**0.5)
    parts = [stored[name] for name in stored if name.endswith("query/kernel")]
    wanted[query] = in_pairs({query: (np.moveaxis(parts[0], 1, 0) if scanned else np.stack(parts)) * scale})[query]
    assert_loaded(write_maxtext(tmp_path / "items", stored), config, abstract, wanted)


def test_our_own_layout_reordered_on_eight_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "_SMALL", 0)
    config, abstract = on_eight_devices(decoder_block="qwen3", use_qk_norm=True, rope_interleave=True)
    params = random_params(config)
    halves = config_of(decoder_block="qwen3", use_qk_norm=True, logits_via_embedding=True)
    write_params(
        tmp_path, halves, {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in params.items()}, None
    )
    assert_loaded(tmp_path, config, abstract, in_pairs(params))


def test_a_file_that_is_cut_while_it_is_read_is_told(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    tensors = stored_tensors(path / "model.safetensors").values()
    last = max(tensors, key=lambda tensor: tensor.start)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(UserError, match=r"model\.safetensors: the file ends within its tensors"):
        last.read(tuple(slice(0, size) for size in last.shape))
