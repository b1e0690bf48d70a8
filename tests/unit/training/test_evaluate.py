"""Loss on held-out rows: sums per batch, and the metrics computed from them."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from support import ALL_COMBINATIONS, arguments, packed_batch, tiny_config

from trainer.backends.base import StateCodec
from trainer.backends.registry import make_model
from trainer.config.errors import RunStopped
from trainer.config.load import load
from trainer.objectives.base import Evaluation, Mean
from trainer.objectives.next_token import NextToken
from trainer.state.shardings import ParamShardings
from trainer.training.build import build
from trainer.training.evaluate import make_evaluation, summarize

ROWS = 5
# Token 0 ends a document and has no bytes.
BYTES = np.arange(64, dtype=np.int32) % 7


def sums_of(nats, tokens, bytes=0):
    mean = Mean(np.float32(nats), np.float32(tokens))
    return {"means": Evaluation(np.float32(tokens), mean, mean), "bytes": np.int32(bytes)}


def test_summary_by_hand():
    metrics = summarize([sums_of(6, 2, 3), sums_of(10, 6, 5)])
    assert metrics == {
        "eval_loss": 2.0,  # 16 nats over 8 tokens; the mean of the batches' means would be 2.33
        "eval_perplexity": pytest.approx(7.38905609893065),
        "eval_tokens": 8,
        "eval_bits_per_byte": pytest.approx(2.885390081777927),  # 16 / ln 2 bits over 8 bytes
    }
    assert isinstance(metrics["eval_tokens"], int)


def test_batches_are_added_in_double_precision():
    metrics = summarize([sums_of(2**24, 2**24), *[sums_of(1, 1)] * 3])
    assert metrics["eval_tokens"] == 2**24 + 3
    assert metrics["eval_loss"] == 1.0


def test_text_that_stands_for_no_byte_has_no_bits_per_byte():
    assert set(summarize([sums_of(6, 2)])) == {"eval_loss", "eval_perplexity", "eval_tokens"}


def test_a_perplexity_too_large_for_a_float_is_infinite():
    assert summarize([sums_of(699, 1)])["eval_perplexity"] == pytest.approx(math.exp(699))
    assert summarize([sums_of(71000, 100)])["eval_perplexity"] == math.inf


@pytest.mark.parametrize("sums", [[], [sums_of(0, 0)], [sums_of(0, 0), sums_of(0, 0)]])
def test_no_tokens_at_all_are_no_perfect_model(sums):
    with pytest.raises(RunStopped, match=r"0 tokens contribute to the loss in its batches; evaluate on other data"):
        summarize(sums)


def test_evaluation_is_the_same_program_with_any_z_loss():
    programs = []
    for multiplier in (0.0, 100.0):
        run = build(load(arguments("nnx", z_loss_multiplier=multiplier)).config, jax.devices()[:1])
        state, _, frozen = run.abstract_args()
        lengths = jax.ShapeDtypeStruct((run.config.vocab_size,), "int32", sharding=run.replicated)
        programs.append(run.eval_step.lower(state, run.abstract_batch(run.eval_rows), frozen, lengths).as_text())
    assert programs[0] == programs[1]


def test_the_sums_hold_the_cross_entropy_alone():
    """Even if the evaluated objective has other terms."""
    config, codec, step, tree = evaluation()
    here = jax.tree.map(lambda leaf: leaf.sharding, tree.params)
    objective = NextToken(codec.model.apply, z_loss_multiplier=100.0, label_smoothing=0.5)
    batch = packed_batch(config, 2)
    fn = make_evaluation(objective, ParamShardings(here, here))
    with_terms = jax.jit(fn)(tree.params, tree.rest, batch, (), BYTES)
    assert jax.device_get(with_terms) == step(batch)


KEYS = {"enable_dropout": True, "dropout_rate": 0.5}


@functools.cache
def evaluation():
    """Returns the compiled evaluation, a state, and five rows with different numbers of real tokens."""
    config = tiny_config(ALL_COMBINATIONS[0], **KEYS)
    model = make_model(config)
    codec = StateCodec(model, optax.sgd(0.1))
    tree = codec.unpack(jax.jit(lambda: codec.init(jax.random.key(0)))())
    here = jax.tree.map(lambda leaf: leaf.sharding, tree.params)
    fn = jax.jit(make_evaluation(NextToken(model.apply), ParamShardings(here, here)))
    return config, codec, lambda batch: jax.device_get(fn(tree.params, tree.rest, batch, (), BYTES)), tree


def batches(whole, rows):
    """Returns the rows of `whole` in batches of `rows`. Zero rows fill the last batch."""
    count = -(-ROWS // rows)
    padded = {k: np.pad(v, [(0, count * rows - ROWS)] + [(0, 0)] * (v.ndim - 1)) for k, v in whole.items()}
    return [{k: v[i * rows : (i + 1) * rows] for k, v in padded.items()} for i in range(count)]


def add(sums):
    return {
        "nats": sum(float(batch["means"].cross_entropy.total) for batch in sums),
        "tokens": sum(float(batch["means"].tokens) for batch in sums),
        "bytes": sum(float(batch["bytes"]) for batch in sums),
    }


@functools.cache
def program_text(combination):
    config, here = tiny_config(combination, **KEYS), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    model = make_model(config)
    params, rest = model.abstract
    at = jax.tree.map(lambda leaf: here, params)
    fn = make_evaluation(NextToken(model.apply), ParamShardings(at, at))
    return jax.jit(fn).lower(params, rest, packed_batch(config, ROWS), (), BYTES).as_text()


@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_every_combination_evaluates_by_the_same_program(combination):
    assert program_text(combination) == program_text(ALL_COMBINATIONS[0])


def test_sums_do_not_depend_on_the_batch_size_or_on_padding():
    config, _, step, _ = evaluation()
    whole = packed_batch(config, ROWS)
    single = [step(batch) for batch in batches(whole, 1)]
    assert len({float(row["means"].tokens) for row in single}) > 2
    expected = add(single)
    found = [step(batch) for batch in batches(whole, 3)]
    assert add(found) == expected | {"nats": pytest.approx(expected["nats"], rel=1e-6)}
    metrics = summarize(single)
    assert summarize(found) == {name: pytest.approx(value, rel=1e-6) for name, value in metrics.items()}


def test_the_sums_are_those_of_the_loss_bearing_tokens():
    config, codec, step, tree = evaluation()
    batch = packed_batch(config, 2)
    batch["targets_segmentation"][:, ::3] = 0  # targets without loss, although their inputs are real tokens
    params = tree.params
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]

    @jax.jit
    def logits_of(params):
        hidden, _, _ = codec.model.apply(params, {}, *inputs)
        return codec.model.apply(params, {}, hidden, method="head")[0]

    logits = np.asarray(logits_of(params), np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    real = batch["targets_segmentation"] != 0
    found = step(batch)
    assert found["means"].tokens == real.sum()
    assert found["bytes"] == BYTES[batch["targets"][real]].sum()
    np.testing.assert_allclose(found["means"].loss.total, nll[real].sum(), rtol=1e-5)
