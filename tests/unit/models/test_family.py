"""A family outside the trainer (tests/two_kinds.py) works like a built-in one."""

import dataclasses
import functools
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_kinds
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from parity_cases import run as parity
from run_cases import arrays_of, train
from support import ALL_COMBINATIONS, arguments, random_variables, tiny_config
from two_kinds import Shift

from trainer.backends.registry import make_model
from trainer.compare import measure
from trainer.config.errors import UserError
from trainer.config.family import Facts
from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.scheduler import Scheduler
from trainer.layers.dense import INPUT
from trainer.layers.stack import Stack
from trainer.leaves.source import names_of
from trainer.models.families import RESERVED, axis_rules, hugging_face, place, stacks
from trainer.models.family import Family
from trainer.models.huggingface import Layout
from trainer.models.llama2 import family as llama2
from trainer.models.names import names_of_blocks
from trainer.models.remat import check_offload, remat_policy
from trainer.models.transformer import Decoder
from trainer.training.build import build
from trainer.weights.huggingface.read import layouts_of, tensors_of
from trainer.weights.maxtext.stored import layer_name

OWN = {"decoder_block": "two_kinds:family", "base_num_decoder_layers": 3}


@functools.cache
def built(combination, **keys):
    words = arguments(combination, **OWN | {"opt_type": "sgd"} | keys)
    return build(load(words).config, jax.devices()[:1])


def program(run):
    return measure.Program("", run, names_of_blocks(run.config))


def test_where_its_parameters_lie():
    run = built("nnx", base_num_decoder_layers=5)
    tree = run.codec.unpack(run.abstract_state)
    assert {name for name in names_of(tree.params) if "mix" in name} == {
        "decoder/shift_layers/mix/kernel",
        "decoder/layers/layers_1/mix/kernel",
    }
    assert {name: leaf.shape for name, leaf in names_of(tree.rest).items()} == {
        "decoder/shift_layers/bias": (1, 16),
        "decoder/layers/layers_1/bias": (2, 16),
    }
    assert run.model.param_axes["decoder"]["layers"]["layers_1"]["mix"]["kernel"] == ("layers", "embed", "shifted")
    assert run.flops_per_token == 3000
    where = {name: place(stacks(run.config), f"0/mu/{name}") for name in names_of(tree.params)}
    assert list(where["decoder/shift_layers/mix/kernel"].layers) == [0]
    assert list(where["decoder/layers/layers_0/mlp/wo/kernel"].layers) == [1, 3]
    assert list(where["decoder/layers/layers_1/mix/kernel"].layers) == [2, 4]
    assert where["decoder/decoder_norm/scale"] is None
    mix = where["decoder/layers/layers_1/mix/kernel"]
    tensors = tensors_of(Layout("model.layers.{}.mix", inputs=1), mix, (2, 16, 8))
    assert tensors == [("model.layers.2.mix", (8, 16)), ("model.layers.4.mix", (8, 16))]
    assert [layer_name(mix, i) for i in range(2)] == ["decoder/layers_1/mix/kernel", "decoder/layers_3/mix/kernel"]
    assert names_of_blocks(run.config).common("decoder/layers/layers_1/mix/kernel").endswith("layers_1/shift/kernel")


@pytest.mark.rest(covered_by="its losses, by a second implementation")
def test_it_trains_by_the_same_program_in_every_combination():
    """Compares the training step over the canonical state."""
    assert len({measure._text(program(built(name))) for name in ALL_COMBINATIONS}) == 1


ENDS = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]


def test_so_it_does_unrolled():
    assert len({measure._text(program(built(name, scan_layers=False))) for name in ENDS}) == 1


@pytest.mark.parametrize("scan", [True, False])
def test_so_does_a_pattern_whose_first_block_has_a_buffer(scan, monkeypatch):
    pattern = [Stack("layers", (Shift, Squared), 1)]
    monkeypatch.setattr(
        two_kinds, "pattern", dataclasses.replace(two_kinds.family, stacks=lambda _: pattern), raising=False
    )
    keys = {"decoder_block": "two_kinds:pattern", "scan_layers": scan}
    assert len({measure._text(program(built(name, **keys))) for name in ENDS}) == 1


def products(**keys):
    """Returns the number of matrix products in a gradient."""
    model = make_model(tiny_config("nnx", **OWN | keys))
    params, rest = model.abstract
    rows = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def loss(params, rest, ids, row):
        return model.apply(params, rest, ids, ids, ids, row)[0].sum()

    args = params, rest, rows, jax.ShapeDtypeStruct((2,), jnp.int32)
    return str(jax.make_jaxpr(jax.grad(loss))(*args)).count("dot_general")


class Squared(Shift):
    """Computes x plus the square of a product. The backward pass needs the product."""

    def __call__(self, x, cache, context):
        y = checkpoint_name(self.mix(x, INPUT), "shifted")
        return x + y * y, cache


def test_a_custom_policy_keeps_what_it_names(monkeypatch):
    squared = dataclasses.replace(two_kinds.family, stacks=lambda config: [Stack("layers", (Squared,), 2)])
    monkeypatch.setattr(two_kinds, "squared", squared, raising=False)
    own = {"decoder_block": "two_kinds:squared", "remat_policy": "custom"}
    kept = products(**own, custom_device_tensors="[shifted]")
    assert kept == products(**own | {"remat_policy": "none"}) == products(**own) - 1


def test_policies_keep_what_it_names():
    counts = {policy: products(remat_policy=policy) for policy in ("none", "full", "minimal")}
    assert counts["none"] < counts["minimal"] < counts["full"]
    # All policies except none recompute two products: the scores and their weighted sum. full also recomputes the
    # products with weights, except each layer's last one, which nothing reads.
    assert counts["minimal"] - counts["none"] == 2
    assert counts["full"] - counts["none"] == 2 + 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"custom_device_tensors": "[shfted]"}, "does not declare shfted, it declares only shifted; nearest: shifted"),
        (
            {"custom_device_tensors": "[shfted]", "custom_offload_tensors": "[query_proj]"},
            r"not declare shfted, .*\n  custom_offload_tensors: .*:family does not declare query_proj",
        ),
        (
            {"custom_device_tensors": "[mlpwi]", "decoder_block": "llama2"},
            "llama2 does not declare mlpwi, it declares none",
        ),
    ],
)
def test_tensors_that_it_does_not_name(keys, message):
    with pytest.raises(UserError, match=message):
        remat_policy(tiny_config("nnx", **OWN | {"remat_policy": "custom"} | keys))


def test_its_own_tensors_can_be_offloaded():
    config = tiny_config("nnx", **OWN, remat_policy="custom", custom_offload_tensors="[shifted]")
    check_offload(config, ["device", "pinned_host"])
    with pytest.raises(UserError, match="custom_offload_tensors=shifted: these devices have no pinned_host memory"):
        check_offload(config, ["device"])


def test_early_checks_are_of_the_tensors_that_it_has(monkeypatch):
    """The family has no MLP, so MLP sizes need not fit the mesh, and MLP rules may use a mesh axis twice."""
    shifts = dataclasses.replace(
        two_kinds.family, stacks=lambda config: [Stack("layers", (Shift,), 2)], axes={"shifted": ("data",)}
    )
    monkeypatch.setattr(two_kinds, "shifts", shifts, raising=False)
    keys = {"base_mlp_dim": 33, "ici_data_parallelism": 2, "ici_fsdp_parallelism": 2}
    keys["logical_axis_rules"] = "[[mlp,[fsdp]]]"
    with pytest.raises(UserError, match=r"embed and mlp of mlp/wi_0/kernel .* both use mesh axis fsdp"):
        build(load(arguments("nnx", **keys)).config, jax.devices()[:4])
    run = build(load(arguments("nnx", decoder_block="two_kinds:shifts", **keys)).config, jax.devices()[:4])
    mix = run.param_shardings.storage["decoder"]["layers"]["mix"]["kernel"]
    assert mix.spec == jax.sharding.PartitionSpec(None, ("fsdp", "expert", "context", "context_usp_ulysses"), "data")
    odd = {"decoder_block": "two_kinds:shifts", "ici_data_parallelism": 3}
    with pytest.raises(UserError, match=r"layers/mix/kernel .*: data 3 by the rule of shifted does not divide 16"):
        build(load(arguments("nnx", **odd)).config, jax.devices()[:3])


def test_it_is_sampled_from_through_caches_of_both_kinds():
    config = tiny_config("nnx", **OWN, max_target_length=6, decode_sampling_strategy="greedy")
    engine = MaxEngine(config, jax.devices()[:1])
    model = engine.served.model
    params, rest = random_variables(model)

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(6), tokens.shape)
        hidden, _, _ = model.apply(params, rest, tokens, positions, jnp.ones_like(tokens), jnp.arange(1))
        return model.apply(params, rest, hidden, method="head")[0]

    scheduler = Scheduler(engine, engine.hold(params, rest))
    scheduler.submit([3, 1, 4])
    tokens = np.array([[3, 1, 4, *(event.token for event in scheduler.run())]])
    logits = np.asarray(jax.jit(forward)(params, tokens))
    np.testing.assert_array_equal(tokens[:, 3:], logits[:, 2:-1].argmax(-1))
    assert len(set(tokens[0, 3:].tolist())) > 2


@pytest.mark.rest(covered_by="its losses, by a second implementation")
def test_it_trains_and_a_run_goes_on_from_its_checkpoint_in_another_combination(tmp_path):
    keys = OWN | {"opt_type": "sgd", "learning_rate_schedule_steps": 4, "eval_interval": -1, "dropout_rate": 0.0}
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        for steps, combination in ((2, ALL_COMBINATIONS[0]), (4, ALL_COMBINATIONS[-1])):
            code, out = train(tmp_path, "run_name=own", combination=combination, steps=steps, **keys)
            assert code == 0, out
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    found = {step: arrays_of(tmp_path / f"runs/own/checkpoints/{step}") for step in (2, 4)}
    for name, array in found[2].items():
        part = name.partition("/")[0]
        if part in ("params", "rest"):  # buffers receive no gradient
            assert (array.tobytes() != found[4][name].tobytes()) == (part == "params"), name
    assert "rest/decoder/layers/layers_1/bias" in found[4]


@pytest.mark.skipif(len(ALL_COMBINATIONS) == 1, reason="there is one combination")
def test_parity_goes_through_the_layers_of_both_stacks(capsys):
    code, out, _ = parity(capsys, "left=nnx", f"right={ALL_COMBINATIONS[-1]}", "--json", only_forward=True, **OWN)
    (comparison,) = json.loads(out)["comparisons"]
    assert (code, comparison["bits"]) == (0, True)
    activations = comparison["quantities"]["activations"]["arrays"]
    outputs = [(it["name"], it["layer"]) for it in activations if it["name"].endswith("output")]
    assert [layer for name, layer in outputs if name.endswith("/output")] == [0, 1, 2]


ONE = Stack("layers", (Shift,), 1)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([ONE, ONE], "stack names must be unique; found: layers, layers"),
        ([], "at least one stack, .* found: none"),
        (None, "not a list of Stack"),
        ([Stack("layers", Shift, 1)], "not a list of Stack"),
        ([Shift], "not a list of Stack"),
        ([Stack("run_layers", (Shift,), 1)], "cannot be named 'run_layers'"),
        ([Stack("decoder_norm", (Shift,), 1)], "cannot be named 'decoder_norm'"),
        ([Stack("a/b", (Shift,), 1)], "cannot be named 'a/b'"),
    ],
)
def test_invalid_stacks(found, message, monkeypatch):
    monkeypatch.setattr(two_kinds, "wrong", Family(lambda config: found), raising=False)
    with pytest.raises(UserError, match=f"decoder_block=two_kinds:wrong: .*{message}"):
        stacks(tiny_config("nnx", decoder_block="two_kinds:wrong"))


def test_every_attribute_of_a_decoder_is_reserved():
    decoder = nnx.eval_shape(lambda: Decoder(tiny_config("nnx"), nnx.Rngs(0)))
    assert {name for name in dir(decoder) if not name.startswith("_")} - {"layers"} <= RESERVED


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"shifted": ("tenosr",)}, "shifted: there is no mesh axis tenosr"),
        ({"shifted": 3}, "shifted: there is no mesh axis 3"),
        ({"mlp": ("tensor",)}, "its axes mlp already have rules"),
    ],
)
def test_invalid_axes(axes, message, monkeypatch):
    monkeypatch.setattr(two_kinds, "wrong", dataclasses.replace(two_kinds.family, axes=axes), raising=False)
    with pytest.raises(UserError, match=f"decoder_block=two_kinds:wrong: (?s:.)*{message}"):
        axis_rules(tiny_config("nnx", decoder_block="two_kinds:wrong"))


def test_a_mesh_axis_by_its_name_alone(monkeypatch):
    own = dataclasses.replace(two_kinds.family, axes={"shifted": "tensor"})
    monkeypatch.setattr(two_kinds, "right", own, raising=False)
    assert axis_rules(tiny_config("nnx", decoder_block="two_kinds:right"))["shifted"] == ("tensor",)


@pytest.mark.parametrize(
    ("rotated", "facts", "message"),
    [
        ("head_dim", {}, ""),
        ("", {"fixes": {"rope_interleave": True}}, ""),
        ("", {"fixes": {"rope_interleave": False}}, ""),
        ("", {"ignores": {"has no RoPE": ["rope_interleave"]}}, ""),
        ("", {}, "the layout of decoder/layers/self_attention/query/kernel has no rotated"),
        ("head_dim", {"fixes": {"rope_interleave": True}}, "query/kernel has rotated='head_dim', for halves"),
    ],
)
def test_the_order_of_a_heads_entries_is_not_said_twice_in_other_words(monkeypatch, rotated, facts, message):
    layouts = {name: it._replace(rotated=it.rotated and rotated) for name, it in llama2.LAYOUTS.items()}
    tables = llama2.FAMILY.hugging_face[0]._replace(layouts=layouts)
    own = dataclasses.replace(llama2.FAMILY, hugging_face=[tables])
    module = SimpleNamespace(FAMILY=own, FACTS=Facts("turned:FAMILY", **facts))
    monkeypatch.setitem(sys.modules, "turned", module)
    config = tiny_config("nnx", decoder_block="turned:FACTS")
    if not message:
        assert hugging_face(config) is tables
        return
    with pytest.raises(UserError, match=message):
        hugging_face(config)


def test_an_incomplete_table_of_hugging_face(monkeypatch):
    layouts = llama2.LAYOUTS | {"decoder/layers/mlp/wo/kernel": Layout("down_proj")}
    del layouts["decoder/layers/mlp/wi_0/kernel"], layouts["decoder/logits_dense/kernel"]
    tables = llama2.FAMILY.hugging_face[0]._replace(layouts=layouts)
    own = dataclasses.replace(llama2.FAMILY, hugging_face=[tables])
    monkeypatch.setattr(two_kinds, "incomplete", own, raising=False)
    config = tiny_config("nnx", decoder_block="two_kinds:incomplete", logits_via_embedding=True)
    names = set(llama2.LAYOUTS) - {"decoder/logits_dense/kernel"}
    with pytest.raises(UserError) as error:
        layouts_of(config, {name: place(stacks(config), name) for name in names})
    assert str(error.value).splitlines()[1:] == [
        "  decoder/layers/mlp/wi_0/kernel: no Layout",
        "  decoder/layers/mlp/wo/kernel: down_proj has no {} for the layer number",
    ]
