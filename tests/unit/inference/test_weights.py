"""The weights of a decode step: separate arrays for each layer, or stacks."""

import functools

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, EVERY_MATRIX, assert_equal_bits, copied, random_variables, tiny_config

from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.inference.served import decoding_loop
from trainer.inference.weights import canonical
from trainer.layers.cache import Layers
from trainer.ops.paths import by_name

WIDE = {"base_emb_dim": 64, "base_mlp_dim": 256, "base_num_decoder_layers": 3, "per_device_batch_size": 1}
PATTERN = {"decoder_block": "gemma2", "base_num_decoder_layers": 4, "sliding_window_size": 8}
KINDS = {
    "heads": {},
    "two stacks, latents, experts": EVERY_MATRIX
    | {"base_num_decoder_layers": 3, "routed_bias": True, "routed_score_func": "sigmoid"},
    "two blocks in turn": PATTERN,
    "stored as integers": {"checkpoint_is_quantized": True, "quantization": "int8", "logits_via_embedding": False},
    "adapters": {"lora.enable_lora": True, "lora.lora_rank": 2, "lora.lora_alpha": 4.0},
}
MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


@functools.cache
def engine_of(combination="nnx", devices=1, **keys):
    keys = {"per_device_batch_size": 2, "decode_sampling_strategy": "greedy"} | keys
    return MaxEngine(tiny_config(combination, devices=devices, **keys), jax.devices()[:devices])


def drawn(engine, variables):
    scheduler = Scheduler(engine, engine.hold(*variables))
    numbers = [scheduler.submit(prompt, limit=6) for prompt in ([5, 0, 17], [9, 3, 3, 8, 1])]
    events = list(scheduler.run())
    return [[event.token for event in events if event.request == number] for number in numbers]


@functools.cache
def sharp(kind):
    return random_variables(engine_of(**KINDS[kind]).served.model)


@functools.cache
def expected(kind, combination="nnx"):
    return drawn(engine_of(combination, **KINDS[kind]), sharp(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_no_bit_changes(kind):
    """NumPy arrays are split on the host, others on their devices."""
    for devices, mesh in ((1, {}), (8, MESH)):
        engine = engine_of(devices=devices, **KINDS[kind], **mesh)
        variables = sharp(kind)
        for given in (variables, jax.device_put(variables)) if mesh and kind == "adapters" else (variables,):
            weights = engine.hold(*given)
            assert_equal_bits(copied(jax.jit(canonical)(weights)), variables)
            stacks = [leaf for leaf in jax.tree.leaves(weights, is_leaf=_is_layers) if _is_layers(leaf)]
            assert len(stacks) > 4
            jax.tree.map(_check_description, engine.parts()["parameters"], weights)


def _check_description(described, held):
    assert (described.shape, described.dtype) == (held.shape, held.dtype)
    assert described.sharding.is_equivalent_to(held.sharding, held.ndim)


def _is_layers(it):
    return isinstance(it, Layers)


@pytest.mark.rest(
    covered_by="the loop with adapters; unit/models/test_families.py",
    cases=("two stacks, latents, experts", "two blocks in turn"),
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "heads"])  # "adapters" covers "heads"
def test_text_does_not_depend_on_the_loop(kind, monkeypatch):
    assert len({token for row in expected(kind) for token in row}) > 1
    monkeypatch.setattr("trainer.inference.served.decoding_loop", lambda config, platform: True)
    rolled = engine_of.__wrapped__(**KINDS[kind])
    assert not any(map(_is_layers, jax.tree.leaves(rolled.parts(), is_leaf=_is_layers)))
    assert drawn(rolled, sharp(kind)) == expected(kind)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_a_step_copies_neither_weights_nor_stacks_in_any_combination(combination):
    """With stacked arrays, the step copied each layer's weights and cache: more than all weights of the layers."""
    engine, unrolled = (engine_of(combination, **WIDE, scan_layers=scan) for scan in (True, False))
    assert engine.config == unrolled.config, "so their programs are the same"
    params, _ = engine.parts()["parameters"]
    layers = sum(leaf.size * 4 for leaf in jax.tree.leaves(params["decoder"]["layers"]))
    _, report = engine.aot_compile()
    assert report.state["parameters"] > layers > 4 * 50_000
    assert report.memory.temporaries < layers / 8
    assert expected("adapters", combination) == expected("adapters")


def test_a_step_has_few_stored_matrices_as_floats_at_once():
    engine = engine_of(**WIDE | KINDS["stored as integers"])
    _, report = engine.aot_compile()
    params, _ = engine.parts()["parameters"]
    floats = sum(4 * leaf.size for leaf in jax.tree.leaves(params["decoder"]) if leaf.dtype == "int8")
    assert floats > 4 * 100_000
    assert report.memory.temporaries < floats / 2


def test_a_round_of_a_rollout_compiles_nothing_and_leaves_no_second_copy():
    engine = engine_of(weight_dtype="bfloat16")
    trained = jax.device_put(jax.tree.map(lambda it: np.ones(it.shape, np.float32), engine.served.model.abstract))
    engine.hold(*trained)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(trained)), "they belong to the trainer"
    before = _compilations()
    weights = engine.hold(*trained, donate=True)
    assert _compilations() == before
    kept = [name for name, leaf in by_name(trained[0]).items() if not leaf.is_deleted()]
    assert kept == ["decoder/decoder_norm/scale"], "float32 in both, and not cut, so it is shared"
    narrow = {name: leaf.dtype.name for name, leaf in by_name(jax.eval_shape(canonical, weights)[0]).items()}
    assert narrow == {name: "float32" if name.endswith("scale") else "bfloat16" for name in narrow}
    weights = engine.load_params(canonical(weights)[0])
    assert jax.eval_shape(lambda: engine.generate(weights, engine.init_decode_state()))[1].tokens.shape == (2,)


def _compilations():
    from trainer.inference import weights

    return weights._layer._cache_size()


def test_stacked_variables_serve_with_a_warning_and_other_ones_are_refused():
    engine = engine_of(**KINDS["adapters"])
    how, variables = {"sampling": Sampling(0.0)}, sharp("adapters")
    _, expected = engine.prefill(engine.hold(*variables), engine.padded([1]), 1, **how)
    with pytest.warns(UserWarning, match="convert them with Engine.hold"):
        _, found = engine.prefill(variables, engine.padded([1]), 1, **how)
    assert found.tokens == expected.tokens
    with pytest.raises(ValueError, match="params are of another model: pass the result of hold or load_params"):
        engine.prefill((variables[0], {"other": variables[1]}), engine.padded([1]), 1, **how)


def test_which_loop():
    for scan in (True, False):
        config = load(["base.yml", f"scan_layers={scan}"]).config
        assert [decoding_loop(config, platform) for platform in ("cpu", "gpu", "tpu")] == [False, scan, scan]
    experts = tiny_config("nnx", decoder_block="mixtral", num_experts=4, num_experts_per_tok=2, base_moe_mlp_dim=8)
    assert [decoding_loop(experts, platform) for platform in ("gpu", "tpu")] == [True, False]
    assert decoding_loop(tiny_config("nnx", **EVERY_MATRIX), "tpu")
    assert decoding_loop(type(experts)({**experts, "batch_invariant": True}), "cpu"), "as in training"
