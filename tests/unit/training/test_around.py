"""Features around the update, in whole steps: spikes, averages, group learning rates, parameter metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, packed_batch
from without_model import OfParameters

from trainer.checkpoint.manager import CheckpointManager, restore
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.load import load
from trainer.export import main
from trainer.layers.sown import MaxLogit
from trainer.leaves.source import names_of
from trainer.optim.average import averaged
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.weights.open import open_source

INTERVAL, FACTOR, EMA, ROWS, STEPS, PERIOD = 8, 2.5, 0.75, 8, 12, 4
KEYS = {
    "skip_step_on_spikes": True,
    "skip_step_interval": INTERVAL,
    "skip_step_scaling_factor": FACTOR,
    "ema_decay": EMA,
    "learning_rate_groups": "[norm=0.5]",
    "gradient_clipping_value": 0.05,
    "parameter_metrics_period": PERIOD,
    "trainable_parameters_mask": "[decoder]",  # the embedding is frozen
    "use_qk_clip": True,
    "qk_clip_threshold": 0.3,
}
# Steps with spikes: all their targets are one token, so that the tokens' gradients add up. The first step is too early
# for detection; the others are consecutive.
PLANTED = (0, 9, 10)
# A different program: another train state, microbatches, a mesh, Zero-1, host memory.
OTHER = {
    "gradient_accumulation_steps": 2,
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "shard_optimizer_over_data": True,
    "optimizer_memory_host_offload": True,
}


class Hot(OfParameters):
    """Its heads are clipped in every step."""

    captures = (MaxLogit,)

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        found = {"MaxLogit": {"decoder/layers/self_attention/max_logit": jnp.full((2, 4), 0.4)}}
        return super().sums(params, rest, batch, key)._replace(sown=found if capture else {})


def run_of(combination, devices=1, **keys):
    rows = ROWS / devices / keys.get("gradient_accumulation_steps", 1)
    return build(
        load(arguments(combination, **KEYS, per_device_batch_size=rows, **keys)).config,
        jax.devices()[:devices],
        make_objective=lambda config, model: Hot(),
    )


def batch_of(run, i):
    batch = packed_batch(run.config, ROWS, seed=i)
    if i in PLANTED:
        batch["targets"][:] = 3
    return placed(run, batch)


def trained(run, state, first=0):
    """Returns the trees before and after each step, starting with `first`, and the steps' metrics."""
    compiled = run.compile()
    trees, metrics = [copied(run.codec.unpack(state))], []
    for i in range(first, STEPS):
        state, found = compiled(state, batch_of(run, i), ())
        trees.append(copied(run.codec.unpack(state)))
        metrics.append(copied(found))
    return trees, metrics


@functools.cache
def reference():
    run = run_of(ALL_COMBINATIONS[0])
    return run, *trained(run, run.init())


def simulated(metrics):
    """Returns which steps are accepted, computed from their reported losses and norms."""
    kept, taken = [], []
    for row in metrics:
        window, pair = np.array(kept[-INTERVAL:], np.float64), [row["loss"], row["grad_norm"]]
        spike = len(kept) >= INTERVAL // 2 and (pair > window.mean(0) + FACTOR * window.std(0)).any()
        taken.append(not spike)
        kept += [] if spike else [pair]
    return taken


def test_spikes_leave_no_trace_but_the_count():
    _, trees, metrics = reference()
    taken = simulated(metrics)
    assert [i for i, was_taken in enumerate(taken) if not was_taken] == list(PLANTED[1:])
    assert [bool(row["skipped"]) for row in metrics] == [not was_taken for was_taken in taken]
    for i, was_taken in enumerate(taken):
        assert trees[i + 1].step == i + 1
        if was_taken:
            assert np.any(
                trees[i].params["decoder"]["decoder_norm"]["scale"]
                != trees[i + 1].params["decoder"]["decoder_norm"]["scale"]
            )
        else:
            assert_equal_bits(trees[i + 1]._replace(step=0), trees[i]._replace(step=0))
    # The schedule does not advance on skipped steps: the reported rate is the update's rate.
    rates = np.array([row["learning_rate"] for row in metrics])
    assert rates[8] > rates[9] == rates[10] == rates[11]
    assert [[row[f"{name}_spike"] for name in ("loss", "grad_norm")] for row in metrics[9:11]] == [[0, 1]] * 2
    rules = trees[-1].opt_state.rules
    assert rules["spikes"].accepted == rules["ema"].updates == sum(taken)


def test_the_average_is_that_of_the_closed_form():
    _, trees, metrics = reference()
    after = [tree.params for tree, row in zip(trees[1:], metrics, strict=True) if not row["skipped"]]
    weights = EMA ** np.arange(len(after) - 1, -1, -1.0)
    assert_equal_bits(averaged(trees[0]), trees[0].params)
    found = averaged(trees[-1])
    assert_equal_bits(found["token_embedder"], trees[0].params["token_embedder"])  # frozen
    assert not jax.tree.leaves(trees[0].opt_state.rules["ema"].average["token_embedder"])

    def mean(average, *params):
        expected = sum(w * p.astype(np.float64) for w, p in zip(weights, params, strict=True)) / weights.sum()
        np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-7)

    jax.tree.map(mean, found, *after)
    first = averaged(trees[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), first, trees[1].params)


def test_evaluation_takes_the_average():
    run, trees, _ = reference()
    lengths = np.ones(run.config.vocab_size, np.int32)
    evaluate = run.eval_step.lower(*run.abstract_args(), lengths).compile()

    def nats(tree):
        state = jax.device_put(run.codec.pack(tree), run.states.shardings)
        return evaluate(state, batch_of(run, 1), (), lengths)["means"].loss.total

    last = trees[-1]
    rule = last.opt_state.rules["ema"]
    same = rule._replace(average={"decoder": last.params["decoder"], "token_embedder": {"embedding": None}})
    raw = last._replace(opt_state=last.opt_state._replace(rules=last.opt_state.rules | {"ema": same}))
    assert nats(last) == nats(last._replace(params=averaged(last))) != nats(raw)


def test_metrics_of_parameters_equal_numpy():
    _, trees, metrics = reference()
    path = "decoder/layers/mlp/wo/kernel"
    for i in range(STEPS):
        row, kernel = metrics[i], trees[i].params["decoder"]["layers"]["mlp"]["wo"]["kernel"]
        if i % PERIOD:
            assert not row[f"param_norm/{path}"].any()  # the loop does not report these
            continue
        norm = np.sqrt((kernel.astype(np.float64) ** 2).sum((1, 2)))
        np.testing.assert_allclose(row[f"param_norm/{path}"], norm, rtol=1e-5)
        squares = sum((value**2).sum() for name, value in row.items() if name.startswith("grad_norm/"))
        np.testing.assert_allclose(row["grad_norm"], np.sqrt(squares), rtol=1e-5)
        change = trees[i + 1].params["decoder"]["layers"]["mlp"]["wo"]["kernel"] - kernel
        if not row["skipped"]:
            ratio = np.sqrt((change.astype(np.float64) ** 2).sum((1, 2))) / norm
            np.testing.assert_allclose(row[f"update_ratio/{path}"], ratio, rtol=1e-3)
    assert not any("token_embedder" in name for name in metrics[0])


def saved(folder, run, tree):
    tree = jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, _abstract(run)))
    with CheckpointManager(folder, run.config, print) as manager:
        manager.save(int(tree.step), tree, Sidecar(to_yaml(run.config), None, "", {}), {})


def test_export_writes_the_average_if_it_is_asked_to(tmp_path, capsys):
    run, trees, _ = reference()
    last, here = trees[-1], tmp_path / "run"
    saved(here, run, last)
    said = {"raw": "the parameters as trained", "ema": "the average of the parameters"}
    for weights, params in (("raw", last.params), ("ema", averaged(last))):
        main([str(here), str(tmp_path / weights), "format=params", f"weights={weights}"])
        assert f"dtype as stored, {said[weights]}\n" in capsys.readouterr().out
        leaves = open_source(str(tmp_path / weights)).leaves(
            run.config, {k: v.shape for k, v in names_of(params).items()}
        )
        assert_equal_bits({name: leaf.parts[0]() for name, leaf in leaves.items()}, names_of(params))
    for name in ("raw", "none"):
        with pytest.raises(SystemExit):
            main([str(tmp_path / name), str(tmp_path / "out"), "format=params", "weights=ema"])
        assert "only a run contains averaged parameters" in capsys.readouterr().err


def test_another_program_goes_on_from_a_checkpoint_with_the_same_decisions(tmp_path):
    run, trees, metrics = reference()
    first = 5
    saved(tmp_path, run, trees[first])
    other = run_of(ALL_COMBINATIONS[-1], 4, **OTHER)
    state = other.codec.pack(restore(tmp_path / "checkpoints" / str(first), _abstract(other)))
    later, found = trained(other, state, first)
    assert_equal_bits(later[0], trees[first])
    assert [row["skipped"] for row in found] == [row["skipped"] for row in metrics[first:]]
    # Adam amplifies the rounding of small gradients.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), averaged(later[-1]), averaged(trees[-1])
    )
    rows = {row["name"]: row["spec"] for row in other.table()["tensors"]}
    averages = {name: spec for name, spec in rows.items() if "/average/" in name}
    assert averages
    for name, spec in averages.items():
        assert spec == rows[name.replace("opt_state/rules/ema/average", "params")]
    assert any("data" in axes for spec in averages.values() for axes in spec)


def _abstract(run):
    return run.codec.unpack(run.abstract_args()[0])


def test_what_is_not_asked_for_is_not_in_the_program():
    asked = {"skip_step_on_spikes": True, "parameter_metrics_period": PERIOD}
    found = []
    for keys in (asked, {}):
        run = build(load(arguments("nnx", base_num_decoder_layers=1, **keys)).config, jax.devices()[:1])
        text, (_, metrics) = jax.make_jaxpr(run.step, return_shape=True)(*run.abstract_args())
        found.append((" cond[" in str(text), {name.split("/")[0] for name in metrics}))
        assert hasattr(run.codec.unpack(run.abstract_state).opt_state, "rules") == bool(keys)
    (has_case, more), (without_case, default) = found
    assert (has_case, without_case) == (True, False)
    assert more - default == {"loss_spike", "grad_norm_spike", "grad_norm", "param_norm", "update_ratio"} - default
    assert default == {"loss", "lm_loss", "grad_norm", "skipped", "finite", "learning_rate", "tokens"}
