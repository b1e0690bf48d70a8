"""Dividing a model's stacks into pipeline stages, and converting trees between stages and layers."""

import itertools
import re

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, EVERY_MATRIX, assert_equal_bits, model_of, tiny_config

from trainer.backends.base import StateCodec
from trainer.config.capabilities.pipeline_keys import Pipeline, unpipelined
from trainer.config.errors import UserError
from trainer.layers.stack import Stack
from trainer.models.families import stacks
from trainer.models.stages import OUTSIDE, in_stages, named_by_layer, stage_text, to_layers, to_stages
from trainer.ops.paths import by_name
from trainer.ops.random import seed_key
from trainer.optim.optimizer import make_optimizer

STAGES = "ici_pipeline_parallelism"
TWO = {STAGES: 2, "ici_fsdp_parallelism": -1, "base_num_decoder_layers": 4}
# FIVE: one dense layer, and four layers in the pipeline. SIX: one more layer, outside the pipeline.
FIVE = {**EVERY_MATRIX, "base_num_decoder_layers": 5}
SIX = {**FIVE, "base_num_decoder_layers": 6, "pipeline_parallel_layers": 4}
GEMMA2 = {"decoder_block": "gemma2", "sliding_window_size": 4}
GEMMA3 = {"decoder_block": "gemma3", "sliding_window_size": 4, "base_num_decoder_layers": 12}


def config_of(combination=ALL_COMBINATIONS[0], **keys):
    return tiny_config(combination, devices=8, **TWO | keys)


def shapes(found):
    return [(stack.name, stack.sizes) for stack in found]


@pytest.mark.parametrize(
    ("keys", "expected", "text"),
    [
        ({}, [("layers", (2, 2, 1))], "2 stages x 2 repeats x 1 layer; 2 microbatches in 5 iterations, 20.0% of"),
        (
            {"num_layers_per_pipeline_stage": 2},
            [("layers", (1, 2, 2))],
            "2 stages x 2 layers; 2 microbatches in 3 iterations, 33.3% of",
        ),
        ({"pipeline_parallel_layers": 2}, [("layers", (1, 2, 1)), (f"layers{OUTSIDE}", (2,))], "; 2 layers outside"),
        # The longest stack is pipelined.
        (FIVE, [("dense_layers", (1,)), ("moe_layers", (2, 2, 1))], "; 1 layer outside"),
        (SIX, [("dense_layers", (1,)), ("moe_layers", (2, 2, 1)), (f"moe_layers{OUTSIDE}", (1,))], "; 1 layer outside"),
        ({**SIX, "first_num_dense_layers": 4}, [("dense_layers", (2, 2, 1)), ("moe_layers", (2,))], "; 2 layers out"),
        # A stage consists of whole patterns, here of two and six layers.
        ({**GEMMA2, "num_layers_per_pipeline_stage": 2}, [("layers", (1, 2, 1))], "2 stages x 2 layers;"),
        ({**GEMMA3, "num_layers_per_pipeline_stage": 6}, [("layers", (1, 2, 1))], "2 stages x 6 layers;"),
    ],
)
def test_which_layers_are_where(keys, expected, text):
    found = stacks(config_of(**keys))
    assert shapes(found) == expected
    assert text in stage_text(found)
    config = unpipelined(config_of(**keys))
    assert sum(stack.layers for stack in found) == config.base_num_decoder_layers
    assert not any(stack.pipeline for stack in stacks(config))
    assert stage_text(stacks(config)) == ""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_layers_per_pipeline_stage": 3},
            "2 stages x 3 layers per stage = 6, which does not divide the 4 layers of the stack layers of ",
        ),
        (
            {"num_layers_per_pipeline_stage": 3},
            "decoder_block=llama2 in the pipeline; nearest: num_layers_per_pipeline_stage=2",
        ),
        (
            {"num_pipeline_repeats": 3},
            "2 stages x 3 repeats x 1 layer per stage = 6, which is not the 4 layers .*: num_pipeline_repeats=2",
        ),
        (
            {"pipeline_parallel_layers": 5},
            "pipeline_parallel_layers=5: the stack layers of decoder_block=llama2 has 4 layers; nearest: "
            "pipeline_parallel_layers=4",
        ),
        (
            GEMMA2,
            "num_layers_per_pipeline_stage=1: .* a pattern of 2 different layers.*: num_layers_per_pipeline_stage=2",
        ),
        (
            {"base_num_decoder_layers": 5},
            "does not divide the 5 layers .*: pipeline_parallel_layers=4, and the other layers run out",
        ),
        ({"base_num_decoder_layers": 1}, "does not divide the 1 layer of .*; nearest: 1 stage$"),
        (
            {"pipeline_parallel_layers": 3, "num_layers_per_pipeline_stage": 2},
            "does not divide the 3 layers of .*; nearest: pipeline_parallel_layers=4, and the other",
        ),
        ({"base_num_decoder_layers": 1, "pipeline_parallel_layers": 2}, "has 1 layer; give at most 1$"),
    ],
)
def test_what_does_not_fit(keys, message):
    with pytest.raises(UserError, match=message):
        stacks(config_of(**keys))


def changes(text):
    """Yields the keys of each setting that a message suggests."""
    for part in filter(None, text.partition("nearest: ")[2].split(" or ")):
        if part.startswith("a stack of"):  # changes the model, not the pipeline
            continue
        count = re.fullmatch(r"(\d+) stages?", part)
        yield {STAGES: int(count[1])} if count else {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", part)}


class Values(dict):
    __getattr__ = dict.__getitem__


def test_the_nearest_settings_fit():
    base, named = Values(config_of()), set()

    def fits(stack, **keys):
        try:
            found = in_stages(Values(base | keys), [stack])
        except UserError as error:
            return str(error)
        assert sum(part.layers for part in found) == stack.layers
        return ""

    for period, layers in ((1, 7), (1, 8), (2, 10), (2, 12), (6, 12)):
        stack = Stack("layers", (object,) * period, layers // period)
        sizes = itertools.product((2, 3, 4), (-1, 1, 2, 3), (1, 2, 3, 6), (-1, *range(1, layers + 2)))
        for keys in (
            dict(
                zip(
                    (STAGES, "num_pipeline_repeats", "num_layers_per_pipeline_stage", "pipeline_parallel_layers"),
                    given,
                    strict=True,
                )
            )
            for given in sizes
        ):
            text = fits(stack, **keys)
            for change in changes(text):
                assert change
                named |= change.keys()
                again = fits(stack, **keys | change)
                # If no number of whole patterns fits, that error is reported first, and another may follow.
                assert not again or ("a pattern of" in text and "a pattern of" not in again), (keys, text, again)
    assert named == {STAGES, "num_pipeline_repeats", "num_layers_per_pipeline_stage", "pipeline_parallel_layers"}


def numbered(config, tree):
    """Returns `tree` with each array filled with the numbers of its layers within their stack."""
    first, firsts = {}, {}
    for stack in stacks(config):
        name = stack.name.removesuffix(OUTSIDE)
        firsts[stack.name] = first.get(name, 0)
        first[name] = firsts[stack.name] + stack.count

    def one(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        stack = next((stack for stack in stacks(config) if stack.name in names), None)
        if stack is None or leaf.shape[: len(stack.sizes)] != stack.sizes:
            return np.zeros(leaf.shape, leaf.dtype)
        number = np.arange(stack.count).reshape(*stack.sizes, *[1] * (leaf.ndim - len(stack.sizes)))
        return np.broadcast_to(firsts[stack.name] + number, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, tree)


def state_of(config):
    model = model_of(config)
    codec = StateCodec(model, make_optimizer(config, model.param_axes))
    return codec.unpack(codec.abstract)


MUON = {"opt_type": "muon"}
ADAFACTOR = {"opt_type": "adafactor", "adafactor_min_dim_size_to_factor": 4, "adafactor_momentum": 0.9}


@pytest.mark.parametrize(
    ("combination", "keys"), [(ALL_COMBINATIONS[0], MUON), *((name, ADAFACTOR) for name in ALL_COMBINATIONS)]
)
def test_a_train_state_by_layer_is_that_without_a_pipeline(combination, keys):
    config = config_of(combination, **SIX | keys)
    found, tree, plain = stacks(config), state_of(config), state_of(unpipelined(config))
    leaves = by_name(tree.params["decoder"])
    assert {leaf.shape[:3] for name, leaf in leaves.items() if name.startswith("moe_layers/")} == {(2, 2, 1)}
    of_layers = jax.eval_shape(lambda tree: to_layers(found, tree), tree)
    assert jax.tree.structure(of_layers) == jax.tree.structure(plain)
    assert jax.tree.leaves(of_layers) == jax.tree.leaves(plain)

    @jax.jit
    def there_and_back(numbers):
        layered = to_layers(found, numbers)
        return layered, to_stages(found, layered)

    numbers = numbered(config, tree)
    layered, back = there_and_back(numbers)
    assert_equal_bits(layered, numbered(unpipelined(config), plain))
    assert_equal_bits(back, numbers)
    assert to_layers(stacks(unpipelined(config)), plain) is plain is to_stages(stacks(unpipelined(config)), plain)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_initial_values_do_not_depend_on_the_pipeline(combination):
    config = config_of(combination, **{"base_num_decoder_layers": 6, "pipeline_parallel_layers": 4})

    def initial(config):
        """Returns one parameter of each kind: a stack's kernels and norm, and the embedding."""

        def some(key):
            found = by_name(to_layers(stacks(config), model_of(config).init(key)[0]))
            kinds = r"token_embedder|mlp/wo/kernel|self_attention/query|pre_self_attention_layer_norm"
            return {name: value for name, value in found.items() if re.search(kinds, name)}

        # Without fusions, because fused code may round a product differently.
        return jax.jit(some, compiler_options={"xla_disable_hlo_passes": "fusion"})(seed_key(0))

    expected = initial(unpipelined(config))
    assert len(expected) == 4
    assert_equal_bits(initial(config), expected)
    kernel = expected["decoder/layers/mlp/wo/kernel"]
    assert len({np.asarray(layer).tobytes() for layer in kernel}) == 6


def test_sown_values_by_layer():
    plan = Pipeline(2, 2, 1, 2)
    inside = Stack("layers", (object,), 4, plan)
    outside = Stack(f"layers{OUTSIDE}", (object,), 2)
    values = {
        "decoder/layers/output": np.arange(8.0).reshape(2, 2, 1, 2),
        f"decoder/layers{OUTSIDE}/output": np.arange(8.0, 12).reshape(2, 2),
        "embedded": np.ones(3),
    }
    found = named_by_layer([inside, outside], values)
    assert found.keys() == {"decoder/layers/output", "embedded"}
    np.testing.assert_array_equal(found["decoder/layers/output"], np.arange(12.0).reshape(6, 2))
    alone = named_by_layer([inside], {"decoder/layers/output": values["decoder/layers/output"]})
    np.testing.assert_array_equal(alone["decoder/layers/output"], np.arange(8.0).reshape(4, 2))
    assert named_by_layer([outside], values) == values
