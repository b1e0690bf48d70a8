"""MaxText's checkpoints of Qwen3-Next and of Qwen 3.5 MoE, whose tensors join several parameters."""

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest
from checkpoint_cases import EXPERTS, assert_same, config_of, random_params, shapes_of, write_maxtext
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config.errors import UserError
from trainer.leaves.source import Leaf
from trainer.models.families import place, stacks
from trainer.weights.maxtext.model_arguments import maxtext_keys
from trainer.weights.maxtext.stored import stored_as
from trainer.weights.maxtext.write import write_maxtext as write
from trainer.weights.open import open_source

KEY_HEADS, VALUE_HEADS, EVERY = 2, 4, 3
SIZES = {"gdn_num_key_heads": KEY_HEADS, "gdn_num_value_heads": VALUE_HEADS, "gdn_key_head_dim": 4}
KEYS = EXPERTS | SIZES | {"gdn_value_head_dim": 6, "shared_experts": 1, "inhomogeneous_layer_cycle_interval": EVERY}
KEYS |= {"logits_via_embedding": False, "norm_topk_prob": True, "partial_rotary_factor": 0.5}
NEXT, WITH_EXPERTS = "qwen3_next", "qwen3_5_moe"
RENAMED = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}


def configured(block, layers, **more):
    return config_of(decoder_block=block, **KEYS | {"base_num_decoder_layers": layers} | more)


def each_layer(config, params):
    """Returns each layer's parameters by path."""
    layers = [{} for _ in range(config.base_num_decoder_layers)]
    for name, value in params.items():
        if where := place(stacks(config), name):
            for number, one in zip(where.layers, value, strict=True):
                layers[number][where.path] = one
    return layers


def layer_there(ours):
    """Returns a layer's tensors as MaxText stores them, by path; see MaxText's Qwen3NextDecoderLayer."""
    there = {
        f"{RENAMED.get(path.split('/')[0])}/scale": value
        for path, value in ours.items()
        if path.split("/")[0] in RENAMED
    }
    there |= {path: value for path, value in ours.items() if path.startswith("mlp/")}

    def joined(mixer, names, shape):
        return np.concatenate([ours[f"{mixer}/{name}/kernel"].reshape(shape) for name in names], axis=-1)

    if "self_attention/query/kernel" in ours:
        mixer, above = "self_attention", "attention/attention"
        there |= {f"{above}/{name}": ours[f"{mixer}/{name}"] for name in ("key/kernel", "value/kernel")}
        there |= {f"{above}/{name}/scale": ours[f"{mixer}/{name}/scale"] for name in ("query_norm", "key_norm")}
        there[f"{above}/query/kernel"] = np.concatenate(
            [ours[f"{mixer}/{it}/kernel"] for it in ("query", "gating")], -1
        )
        there[f"{above}/out/kernel"] = ours[f"{mixer}/out/kernel"].reshape(-1, 16)
        return there
    mixer, above, per_key_head = "linear_attention", "attention", (16, KEY_HEADS, -1)
    there |= {f"{above}/{name}": ours[f"{mixer}/{name}"] for name in ("A_log", "dt_bias")}
    there[f"{above}/norm/rms_norm/scale"] = ours[f"{mixer}/norm/scale"]
    there[f"{above}/out_proj/kernel"] = ours[f"{mixer}/out/kernel"].reshape(-1, 16)
    names = ("query", "key", "value", "gating")
    there[f"{above}/in_proj_qkvz/kernel"] = joined(mixer, names, per_key_head).reshape(16, -1)
    there[f"{above}/in_proj_ba/kernel"] = joined(mixer, ("beta", "decay"), per_key_head).reshape(16, -1)
    there[f"{above}/conv1d/kernel"] = joined(mixer, [f"{name}_conv" for name in names[:3]], (4, 1, -1))
    return there


def stacked(axis, layers):
    return {path: np.stack([layer[path] for layer in layers], axis) for path in layers[0]}


def under(above, tensors):
    return {f"decoder/{above}/{path}": value for path, value in tensors.items()}


def tree_of(config, params, scanned, axis=1):
    """Returns MaxText's arrays of `params`, by name."""
    tree = {name: value for name, value in params.items() if not place(stacks(config), name)}
    layers = [layer_there(ours) for ours in each_layer(config, params)]
    if not scanned:
        for number, layer in enumerate(layers):
            tree |= under(f"layers_{number}", layer)
        return tree
    whole = len(layers) // EVERY * EVERY
    if config.decoder_block == WITH_EXPERTS:
        for i in range(EVERY):
            tree |= under(f"layers/layer_{i}", stacked(axis, layers[i:whole:EVERY]))
        return tree
    local = [stacked(axis, layers[first : first + EVERY - 1]) for first in range(0, whole, EVERY)]
    tree |= under("layers/local_layers", stacked(axis, local))
    tree |= under("layers/global_layer", stacked(axis, layers[EVERY - 1 : whole : EVERY]))
    return tree | (under("layers_remainder/local_layers", stacked(axis, layers[whole:])) if layers[whole:] else {})


def leaves_of(params):
    return {
        name: Leaf(value.shape, value.dtype, [lambda x=x: x for x in (value if "/layers" in name else [value])])
        for name, value in params.items()
    }


def on_the_host(path, config, *, part=""):
    leaves = open_source(str(path)).leaves(config, shapes_of(config))
    return {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items() if part in name}


@pytest.mark.parametrize(
    ("block", "layers", "scanned"),
    [(NEXT, 8, True), (NEXT, 4, False), (WITH_EXPERTS, 6, True), (WITH_EXPERTS, 3, False)],
)
def test_both_ways(tmp_path, block, layers, scanned):
    config = configured(block, layers)
    params = random_params(config)
    write(tmp_path, config, leaves_of(params), None, scanned)
    found = orbax.PyTreeCheckpointer().restore((tmp_path / "0/items").absolute())["params"]["params"]
    assert_same(jax.tree.map(np.asarray, found), tree_of(config, params, scanned))
    part = "attention/"
    assert_same(on_the_host(tmp_path, config, part=part), {name: it for name, it in params.items() if part in name})


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("layers_1/linear_attention/gating", ["stage", "fsdp", None, "tensor"], ["fsdp", "stage", None, None]),
        ("layers_1/linear_attention/out", ["stage", "tensor", None, "fsdp"], [None, "stage", None, "fsdp"]),
        ("layers_2/self_attention/query", ["stage", "fsdp", "tensor", None], ["fsdp", "stage", "tensor", None]),
    ],
)
def test_a_tensor_is_sharded_on_the_axes_that_it_shares_with_the_parameter(name, ours, theirs):
    config, name = configured(NEXT, 6), f"decoder/layers/{name}/kernel"
    assert stored_as(config, name, place(stacks(config), name), shapes_of(config), 1).spec(ours) == theirs


def test_in_slices_and_with_layers_on_axis_0(tmp_path):
    config = configured(NEXT, 8)
    params = random_params(config)
    write_maxtext(tmp_path / "items", tree_of(config, params, True, axis=0))
    leaves = open_source(str(tmp_path)).leaves(config, shapes_of(config))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    first, rest = "decoder/layers/layers_1/linear_attention", "decoder/layers_remainder/layers_1/linear_attention"
    last = f"decoder/layers/layers_{EVERY - 1}/self_attention"
    for name, spec in {
        f"{first}/gating/kernel": (None, "fsdp", "tensor"),
        f"{first}/value_conv/kernel": (None, None, "tensor"),
        f"{first}/out/kernel": (None, "tensor", None, "fsdp"),
        f"{first}/A_log": (None, "tensor"),
        f"{rest}/key/kernel": (None, "fsdp", "tensor"),
        f"{last}/gating/kernel": (None, "fsdp", "tensor"),
        "decoder/layers/layers_0/mlp/routed_experts/wo": (None, None, None, "fsdp"),
    }.items():
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        abstract = jax.ShapeDtypeStruct(params[name].shape, np.float32, sharding=sharding)
        [value] = [put(abstract) for put in leaves[name].puts]
        assert value.sharding == sharding
        np.testing.assert_array_equal(value, params[name], err_msg=name)


@pytest.mark.parametrize(
    ("block", "layers", "more", "message"),
    [
        (
            "qwen3_5",
            6,
            {"num_experts": 1, "num_experts_per_tok": 1, "shared_experts": 0},
            "all layers of MaxText's block have experts",
        ),
        (WITH_EXPERTS, 7, {}, "base_num_decoder_layers=7: MaxText omits layers after the last whole repetition of 3"),
        (NEXT, 6, {"shared_experts": 2}, "shared_experts=2: MaxText has one shared expert"),
        (NEXT, 6, {"norm_topk_prob": False}, "norm_topk_prob=False: MaxText always weights"),
        (NEXT, 6, {"mtp_num_layers": 1}, "mtp_num_layers=1: MaxText's MTP module is a whole repetition"),
        (NEXT, 6, {"rope_linear_scaling_factor": 2.0}, "rope_linear_scaling_factor=2.0: only 1"),
    ],
)
def test_what_maxtext_does_not_have_is_refused(tmp_path, block, layers, more, message):
    config = configured(block, layers, **more)
    with pytest.raises(UserError, match=f"(?s)MaxText's block {block} cannot compute:.*{message}"):
        maxtext_keys(config)
    if more.keys() & {"norm_topk_prob", "rope_linear_scaling_factor"}:
        assert any(message in note for note in source(tmp_path, NEXT, 6).notes(config))
        return
    mtp = {"mtp_block/mtp_layer_1/mtp_1_embedding_norm/scale": np.ones(16, np.float32)}
    found = source(tmp_path, WITH_EXPERTS if "5" in block else NEXT, 6, mtp if "mtp_num_layers" in more else {})
    with pytest.raises(UserError, match=f"(?s)not fit the configuration.*MaxText's block: .*{message}"):
        found.leaves(config, shapes_of(config))


def source(path, block, layers, more=()):
    config = configured(block, layers)
    write_maxtext(path / "items", tree_of(config, random_params(config), True) | dict(more))
    return open_source(str(path))


def test_keys_for_maxtext():
    keys = maxtext_keys(configured(WITH_EXPERTS, 6))
    assert keys["decoder_block"] == "qwen3_5"
    assert (keys["use_qk_norm"], keys["shared_experts"]) == (False, 1)
    wanted = SIZES | {"inhomogeneous_layer_cycle_interval": EVERY, "partial_rotary_factor": 0.5, "base_mlp_dim": 24}
    assert keys.items() >= wanted.items()
