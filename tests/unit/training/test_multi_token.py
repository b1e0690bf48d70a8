"""Multi-token prediction: its loss, compared with a second implementation, its weights, and every combination."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    compiled,
    copied,
    first_tree,
    lowered_update,
    model_of,
    packed_batch,
    random_params,
    tiny_config,
)

from trainer.backends.base import StateCodec, TrainTree
from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.layers.sown import MtpHidden, RouterCount, Total, sow
from trainer.leaves.source import names_of
from trainer.models.llama2 import block as llama2
from trainer.models.mtp import Ahead, run_mtp
from trainer.models.transformer import BEFORE_HEAD, EMBEDDING, outer_dropout
from trainer.objectives.forward import ahead_of
from trainer.objectives.multi_token import MultiToken
from trainer.objectives.registry import make_objective
from trainer.ops.random import seed_key
from trainer.optim.optimizer import make_optimizer
from trainer.products.context import Context
from trainer.state.shardings import ParamShardings
from trainer.training.build import build
from trainer.training.evaluate import make_evaluation, summarize
from trainer.training.step import make_gradients

KEYS = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}


def rows(config, count):
    """Returns packed rows whose targets are the next tokens of their segments.

    Some tokens bear no loss, and the last row is padding.
    """
    batch = packed_batch(config, count)
    segment = batch["inputs_segmentation"]
    following = np.pad(segment[:, 1:], ((0, 0), (0, 1)))
    batch["targets"] = np.where(following == segment, np.pad(batch["inputs"][:, 1:], ((0, 0), (0, 1))), 0)
    bears_loss = (following == segment) & (segment != 0)
    bears_loss[0, :9] = False  # a prompt
    bears_loss[-1] = False
    batch["targets_segmentation"] = np.where(bears_loss, segment, 0)
    return given(config, {name: array.astype(np.int32) for name, array in batch.items()})


def given(config, batch):
    """Returns `batch` with the fields that the objective derives."""
    return MultiToken(None, config.mtp_num_layers, 1.0).prepare(batch)


@functools.cache
def parameters(**keys):
    """Returns random parameters on one device, the same for every combination and mesh."""
    model = model_of(tiny_config(ALL_COMBINATIONS[0], **(KEYS | keys)))
    return jax.device_put(random_params(model.abstract[0]), jax.devices()[0])


@functools.cache
def program(combination, *, microbatches=1, capture=(), **keys):
    """Returns the configuration, an uncompiled function `gradients` of a state and 8 rows, and the initial state."""
    config = tiny_config(combination, gradient_accumulation_steps=microbatches, **(KEYS | keys))
    model = make_model(config)
    params = parameters(**{key: value for key, value in keys.items() if key == "mtp_num_layers"})
    tree = TrainTree(np.int32(0), params, None, {})
    return config, make_gradients(config, make_objective(config, model), shardings(params), capture), tree


def shardings(params):
    here = jax.tree.map(lambda leaf: leaf.sharding, params)
    return ParamShardings(here, here)


@functools.cache
def executable(combination=ALL_COMBINATIONS[0], **keys):
    _, fn, tree = program(combination, **keys)
    made = jax.jit(fn)
    return lambda batch: jax.device_get(made(tree, batch))


@functools.cache
def gradients(combination=ALL_COMBINATIONS[0], **keys):
    return executable(combination, **keys)(rows(program(combination, **keys)[0], 8))


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def attention(p, x, config):
    """Computes attention within a single segment, so that no segment mask is needed."""
    length, (_, heads, width) = len(x), p["query"]["kernel"].shape
    q, k, v = (np.einsum("te,ehd->thd", x, p[name]["kernel"]) for name in ("query", "key", "value"))
    angle = np.arange(length)[:, None] / config.rope_max_timescale ** (np.arange(0, width, 2) / width)

    def turned(y):
        a, b = np.split(y, 2, axis=-1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    q, k = turned(q), np.repeat(turned(k), heads // k.shape[1], axis=1)
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(width)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd,hde->te", weights, np.repeat(v, heads // v.shape[1], axis=1), p["out"]["kernel"])


def block(p, x, config):
    x = x + attention(p["self_attention"], norm(x, p["pre_self_attention_layer_norm"]["scale"]), config)
    h, mlp = norm(x, p["post_self_attention_layer_norm"]["scale"]), p["mlp"]
    gate = h @ mlp["wi_0"]["kernel"]
    return x + (gate / (1 + np.exp(-gate)) * (h @ mlp["wi_1"]["kernel"])) @ mlp["wo"]["kernel"]


def nats(params, config, h, targets):
    table = params["token_embedder"]["embedding"]
    logits = h @ table.T / np.sqrt(config.base_emb_dim)
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    return log_z - logits[np.arange(len(targets)), targets], logits.argmax(-1)


def second(params, batch, config):
    """Returns per depth, from 0, the nats and most likely token of each loss-bearing token: {(row, t): pair}.

    Computed document by document in NumPy, from the tokens and hidden states of that document only.
    """
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    found = [{} for _ in range(config.mtp_num_layers + 1)]
    for row in range(len(batch["inputs"])):
        segments = batch["inputs_segmentation"][row]
        for segment in set(segments) - {0}:
            at = np.flatnonzero(segments == segment)
            tokens, bears_loss = batch["inputs"][row, at], batch["targets_segmentation"][row, at] != 0
            embedded = params["token_embedder"]["embedding"][tokens]
            h = embedded
            for layer in range(config.base_num_decoder_layers):
                one = jax.tree.map(lambda leaf, i=layer: leaf[i], params["decoder"]["layers"])
                h = block(one, h, config)
            h = norm(h, params["decoder"]["decoder_norm"]["scale"])
            for k in range(config.mtp_num_layers + 1):
                if len(at) <= k:
                    break
                if k:
                    part = {
                        name.removeprefix(f"mtp_{k}_"): leaf
                        for name, leaf in params["mtp_block"][f"mtp_layer_{k}"].items()
                    }
                    left = norm(embedded[k:], part["embedding_norm"]["scale"])
                    h = np.concatenate([left, norm(h[: len(left)], part["hidden_state_norm"]["scale"])], axis=-1)
                    h = block(part["transformer_layer"], h @ part["projection"]["kernel"], config)
                    h = norm(h, part["final_norm"]["scale"])
                losses, best = nats(params, config, h, batch["targets"][row, at][k:])
                for i, loss in enumerate(losses):
                    if bears_loss[i + k]:
                        found[k][row, at[i]] = loss, best[i]
    return found


def test_the_loss_of_a_packed_batch_is_that_of_a_second_implementation():
    found, (config, _, tree) = gradients(), program(ALL_COMBINATIONS[0])
    assert config.normalization_layer_epsilon == 1e-5
    per_depth = second(copied(tree.params), rows(config, 8), config)
    means = [np.mean([loss for loss, _ in depth.values()]) for depth in per_depth]
    assert len({len(depth) for depth in per_depth}) == 3, "each depth should have its own number of tokens"
    # Float32 compared with float64.
    np.testing.assert_allclose(found.means["lm_loss"], means[0], rtol=2e-6)
    np.testing.assert_allclose(found.means["mtp_loss"], 0.3 * np.mean(means[1:]), rtol=2e-6)
    np.testing.assert_allclose(found.loss, found.means["lm_loss"] + found.means["mtp_loss"], rtol=1e-6)
    assert found.tokens == len(per_depth[0])


def test_the_acceptance_rate_is_that_of_a_second_implementation():
    config, _, tree = program(ALL_COMBINATIONS[0])
    params, batch, lengths = dict(tree.params), rows(config, 8), np.zeros(64, np.int32)
    # Before training, a module's and the model's greedy tokens rarely agree. With a small vocabulary, some agree.
    table = params["token_embedder"]["embedding"]
    few = np.where(np.arange(64)[:, None] < 3, np.float32(9), np.float32(0.1))
    params["token_embedder"] = {"embedding": jax.device_put(np.asarray(table) * few, table.sharding)}
    config = tiny_config(ALL_COMBINATIONS[0], mtp_eval_target_module=2, **KEYS)
    fn = make_evaluation(make_objective(config, make_model(config)), shardings(params))
    args = params, tree.rest, batch, (), lengths
    found = summarize([jax.device_get(compiled(fn, *args)(*args))])

    main, _, deepest = second(copied(params), batch, config)
    everywhere = second(copied(params), batch | {"targets_segmentation": batch["inputs_segmentation"]}, config)[0]
    accepted = [best == everywhere[row, t + 2][1] for (row, t), (_, best) in deepest.items()]
    assert 0 < np.mean(accepted) < 1
    assert found["eval_mtp_acceptance_rate"] == pytest.approx(np.mean(accepted))
    assert found["eval_loss"] == pytest.approx(
        np.mean([loss for loss, _ in main.values()]), rel=2e-6
    )  # the next-token loss


def test_terms_and_names():
    """Uses one combination: tests/integration/test_five_combinations.py shows that all have the same program."""
    keys = {"z_loss_multiplier": 1e-3, "label_smoothing": 0.1, "mtp_num_layers": 1, "capture": (Total,)}
    config, fn, tree = program(ALL_COMBINATIONS[0], **keys)
    found = jax.eval_shape(fn, tree, rows(config, 8))
    parts = {"lm_loss", "z_loss", "label_smoothing_loss", "mtp_loss", "mtp_z_loss", "mtp_label_smoothing_loss"}
    assert found.means.keys() == parts
    assert "mtp_block/mtp_layer_1/mtp_1_transformer_layer/output_sum" in found.sown["Total"]


@pytest.mark.rest(covered_by="its loss, by a second implementation")
def test_one_seed_gives_the_same_modules_in_every_combination():
    models = (make_model(tiny_config(combination, mtp_num_layers=1)) for combination in ALL_COMBINATIONS)
    first, *others = (compiled(model.init, seed_key(0))(seed_key(0))[0] for model in models)
    for params in others:
        assert_equal_bits(params, first)


def close(found, expected):
    """Compares sums that are added in different orders."""
    for (name, a), b in zip(names_of(found).items(), names_of(expected).values(), strict=True):
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max(), name


def test_microbatches_and_tiles_give_the_same_gradients_and_terms():
    """Also with unrolled layers. Tiles are parts of the tokens in the loss. The gradients of a module's parameters come
    only from its loss term."""
    microbatches = 4
    whole, parts = gradients(), gradients(microbatches=microbatches, scan_layers=False, num_vocab_tiling=4)
    tokens = (rows(program(ALL_COMBINATIONS[0])[0], 8)["targets_segmentation"] != 0).sum(1)
    assert len({tokens[j::microbatches].sum() for j in range(microbatches)}) > 1, "unequal microbatches"
    for name in whole.means:
        np.testing.assert_allclose(parts.means[name], whole.means[name], rtol=2e-6)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(whole.grads))
    close(parts.grads, whole.grads)


def test_a_module_without_tokens_adds_nothing():
    fn, batch = executable(), rows(program(ALL_COMBINATIONS[0])[0], 8)
    pairs = np.broadcast_to(1 + np.arange(16) // 2, (8, 16)).astype(np.int32)  # documents of two tokens
    config = program(ALL_COMBINATIONS[0])[0]
    batch |= {
        "inputs_segmentation": pairs,
        "targets_segmentation": pairs,
        "inputs_position": np.arange(16) % 2 + 0 * pairs,
    }
    found = fn(given(config, batch))
    assert found.means["mtp_loss"] > 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((found.grads, found.loss)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found.grads["mtp_block"]["mtp_layer_2"]))
    single = np.broadcast_to(1 + np.arange(16, dtype=np.int32), (8, 16))
    alone = fn(given(config, batch | {"inputs_segmentation": single}))
    assert alone.means["mtp_loss"] == 0
    assert alone.loss == alone.means["lm_loss"] > 0


class Planted(llama2.Block):
    """Sows hidden states of the modules' type and an intermediate, which a generic collector would count."""

    def __call__(self, x, *args):
        x, cache = super().__call__(x, *args)
        sow(self, MtpHidden, "hidden", x)
        self.sow(nnx.Intermediate, "losses", x.sum())
        return x, cache


@pytest.mark.rest(covered_by="its loss, by a second implementation")
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_else_a_block_sows_is_not_counted(monkeypatch):
    monkeypatch.setitem(sys.modules, "planted", SimpleNamespace(Block=Planted))
    first, last = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]
    batch = rows(program(first)[0], 8)

    def lowered(combination, sown=True, **keys):
        """Returns the lowered text of the gradients' program, with or without sown values, and its abstract results."""
        _, fn, tree = program(combination, **keys)
        made = jax.jit(lambda *args: fn(*args) if sown else fn(*args)._replace(sown={})).lower(tree, batch)
        return made.as_text(), made.out_info

    keys = {"decoder_block": "planted:Block", "capture": (Total,)}
    assert lowered(first, sown=False, **keys) == lowered(first, sown=False)
    text, results = lowered(first, **keys)
    assert results.sown.keys() == {"Total"}
    assert lowered(last, **keys)[0] == text


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_hidden_states_are_sown_and_no_state(combination):
    """They are neither parameters nor other train state, and popping Intermediate does not remove them.

    The modules run only if the batch contains the tokens ahead.
    """
    config = tiny_config(combination, **KEYS)
    model = make_model(config)
    codec = StateCodec(model, make_optimizer(config, model.param_axes))
    tree = codec.unpack(codec.abstract)
    assert tree.rest == {}
    assert not [name for name in names_of(tree.params) if name.endswith("/output")]
    assert not issubclass(MtpHidden, nnx.Intermediate)

    batch = given(config, packed_batch(config, 2))
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]

    def products(capture, ahead=None):
        forward = lambda params: model.apply(params, {}, *inputs, capture=capture, ahead=ahead)[:2]  # noqa: E731
        text, (_, sown) = jax.make_jaxpr(forward, return_shape=True)(tree.params)
        return str(text).count("dot_general"), sown

    plain, sown = products(())
    assert sown == {}
    captured, sown = products((MtpHidden,), ahead_of(batch))
    assert captured > plain
    assert sown["MtpHidden"].keys() == {f"mtp_block/mtp_layer_{k}/output" for k in (1, 2)}


def test_dropout_keys_are_the_modules_own():
    config = tiny_config(ALL_COMBINATIONS[0], dropout_rate=0.5, **KEYS)
    keys = []

    def recorded(x, key, *args):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return x

    def run_block(held, x, context, types):
        for site in range(3):
            recorded(x, context.at(site).key)
        return x, {}

    ids = jnp.ones((1, 4), jnp.int32)
    context = Context(ids, ids, ids[0, :1], jax.random.key(0))
    x = jnp.zeros((1, 4, 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.models.mtp.dropout", recorded)
        patch.setattr("trainer.models.transformer.dropout", recorded)
        ahead = Ahead(*(jnp.ones((1, 4, 2), jnp.int32),) * 2)
        run_mtp(config, lambda k, name: lambda *args: x, run_block, jnp.stack([x, x]), x, context, ahead, ())
        for site in (EMBEDDING, BEFORE_HEAD):
            outer_dropout(config, x, context, site)
        for layer in range(config.base_num_decoder_layers):
            run_block(None, x, context.at(layer), ())
    assert len(keys) == 2 * 5 + 2 + 2 * 3
    assert len(set(keys)) == len(keys)


@pytest.mark.rest(covered_by="its loss, by a second implementation")
def test_the_heads_of_modules_are_clipped_too():
    keys = KEYS | {"use_qk_clip": True, "qk_clip_threshold": 1e-3, "opt_type": "sgd", "learning_rate": 0.0}
    keys |= {"gradient_clipping_threshold": 0}

    def lowered(combination):
        run = build(load(arguments(combination, **keys)).config, jax.devices()[:1])
        return run, lowered_update(run)

    run, update = lowered(ALL_COMBINATIONS[0])
    assert lowered(ALL_COMBINATIONS[-1])[1].as_text() == update.as_text()
    tree = first_tree(run)
    after, metrics = update.compile()(tree, rows(run.config, 4), ())
    assert metrics["clipped_heads"] == 4 * (2 + 2)
    for k in (1, 2):
        name = f"mtp_block/mtp_layer_{k}/mtp_{k}_transformer_layer/self_attention/query/kernel"
        assert np.abs(names_of(after.params)[name]).max() < 0.5 * np.abs(names_of(tree.params)[name]).max()


def test_evaluation_without_a_target_is_the_program_of_a_model_without_modules():
    counts = {}
    for name, keys in {"plain": {}, "modules": KEYS, "evaluated": KEYS | {"mtp_eval_target_module": 1}}.items():
        run = build(load(arguments("nnx", **keys)).config, jax.devices()[:1])
        lengths = jax.ShapeDtypeStruct((run.config.vocab_size,), "int32", sharding=run.replicated)
        traced = run.eval_step.trace(run.abstract_args()[0], run.abstract_batch(run.eval_rows), (), lengths)
        counts[name] = str(traced.jaxpr).count("dot_general")
    assert counts["plain"] == counts["modules"] < counts["evaluated"]


@pytest.mark.parametrize("word", ["mtp_num_layers=16", "mtp_eval_target_module=1"])
def test_modules_that_cannot_be(word):
    with pytest.raises(UserError, match=word):
        load([*arguments("nnx"), word])


def test_routers_of_modules_count_the_tokens_whose_successors_are_in_their_segment():
    """Packed rows with padding are compared with a count document by document."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8, "base_num_decoder_layers": 1}
    config = tiny_config(ALL_COMBINATIONS[0], decoder_block="mixtral", **experts, **KEYS)
    model, batch = make_model(config), given(config, packed_batch(config, 4))
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]

    def counts(params):
        types = MtpHidden, RouterCount
        return model.apply(params, {}, *inputs, capture=types, ahead=ahead_of(batch))[1]["RouterCount"]

    found = jax.device_get(jax.jit(counts)(random_params(model.abstract[0])))
    documents = [
        size for row in batch["inputs_segmentation"] for size in np.bincount(row, minlength=1)[1:].tolist() if size
    ]
    expected = [sum(max(size - k, 0) for size in documents) for k in range(3)]
    assert len(set(expected)) == 3
    for k, tokens in enumerate(expected):
        start = f"mtp_block/mtp_layer_{k}/" if k else "decoder/"
        of_block = {name.rpartition("/")[2]: value for name, value in found.items() if name.startswith(start)}
        assert of_block["tokens"] == tokens
        assert of_block["tokens_per_expert"].sum() == 2 * tokens
