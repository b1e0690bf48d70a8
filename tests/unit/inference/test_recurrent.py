"""The engine with a recurrent model against full forward passes. The recurrent state of a slot has a constant size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import model_of, random_variables, tiny_config

from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler

LENGTH, SLOTS, VOCABULARY = 40, 2, 64
KEYS = {
    **{"decoder_block": "qwen3_5", "use_qk_norm": True, "inhomogeneous_layer_cycle_interval": 2},
    **{"gdn_num_key_heads": 2, "gdn_num_value_heads": 4, "gdn_key_head_dim": 4, "gdn_value_head_dim": 6},
    **{"gdn_conv_kernel_dim": 3, "gdn_chunk_size": 4, "vocab_size": VOCABULARY, "logits_via_embedding": True},
    **{"max_target_length": LENGTH, "return_log_prob": True, "decode_sampling_strategy": "greedy"},
    **{"use_chunked_prefill": True, "prefill_chunk_size": 5, "enable_prefix_caching": True},
    "prefix_caching_hbm_byte": 10**6,
}
# Float32 sums in another order; log-probabilities are of the order of 10.
ROUNDING = 2e-5
PROMPTS = {"short": [5, 0, 17], "long": list(range(1, 34)), "one": [9], "full": [3] * (LENGTH - 1), "two": [7, 8] * 8}
LAYERS = ("layers_0", "layers_1")


@functools.cache
def made():
    """Returns an engine, its variables, and a forward pass without a cache."""
    config = tiny_config("nnx", per_device_batch_size=SLOTS, **KEYS)
    params, rest = random_variables(model_of(config))
    layers = params["decoder"]["layers"]
    linear = layers["layers_0"]["linear_attention"]
    linear["A_log"][:] = np.linspace(-4, -1, 4)  # a memory of 10 to 100 tokens
    linear["out"]["kernel"] *= 4
    for layer in LAYERS:
        for norm in ("pre", "post"):
            layers[layer][f"{norm}_self_attention_layer_norm"]["scale"][:] = 0
    params["token_embedder"]["embedding"] *= 3
    signs = np.sign(np.random.default_rng(0).normal(size=16)).astype(np.float32)
    params["decoder"]["decoder_norm"]["scale"] = 4 * signs - 1
    engine = MaxEngine(config, jax.devices()[:1])

    @jax.jit
    def forward(tokens):
        positions = jnp.arange(LENGTH)[None]
        model, zeros = engine.served.model, jnp.zeros(1, int)
        hidden = model.apply(params, rest, tokens, positions, jnp.ones_like(positions), zeros)[0]
        return jax.nn.log_softmax(model.apply(params, rest, hidden, method="head")[0][0])

    return engine, engine.hold(params, rest), forward


def check_greedy(prompt, drawn):
    """Checks that each token is the likeliest after its predecessors, and its log-probability."""
    tokens = list(prompt)
    assert drawn
    for token, log_prob in drawn:
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(tokens)] = tokens
        expected = np.asarray(made()[2](row))[len(tokens) - 1]
        assert token == expected.argmax()
        assert log_prob == pytest.approx(expected[token], abs=ROUNDING)
        tokens.append(token)


def texts_of(scheduler, numbers):
    found = {number: [] for number in numbers}
    for event in scheduler.run():
        if event.token is not None and event.request in found:
            found[event.request].append((event.token, event.log_prob))
    return [found[number] for number in numbers]


def test_slots_that_are_used_again_get_the_tokens_of_full_forward_passes():
    """Prompts are prefilled in chunks, there are more requests than slots, and one is cancelled while others run."""
    engine, params, _ = made()
    scheduler = Scheduler(engine, params)
    cancelled = scheduler.submit([11, 12, 13, 14], sampling=Sampling(0.0))
    numbers = [scheduler.submit(prompt, sampling=Sampling(0.0)) for prompt in PROMPTS.values()]
    for _ in range(3):
        scheduler.turn()
    scheduler.cancel(cancelled)
    texts = texts_of(scheduler, numbers[2:])
    for prompt, text in zip(list(PROMPTS.values())[2:], texts, strict=True):
        assert len(text) == LENGTH - len(prompt)
        check_greedy(prompt, text)
    again = [scheduler.submit(prompt, sampling=Sampling(0.0)) for prompt in PROMPTS.values()]
    for prompt, text in zip(PROMPTS.values(), texts_of(scheduler, again), strict=True):
        check_greedy(prompt, text)
    assert len({token for token, _ in texts[0]}) > 4, "the continuation should not be one token over and over"
    sizes = {leaf.shape[2:] for leaf in jax.tree.leaves(engine.init_decode_state().cache)}
    assert sizes == {(4, 4, 6), (2, 2, 4), (2, 4, 6), (LENGTH, 2, 8)}


def test_a_prefix_is_used_again_only_if_all_of_it_is_common():
    engine, params, _ = made()
    scheduler = Scheduler(engine, params)
    whole = list(range(20, 29))
    for prompt, reused in ((whole, 0), ([*whole, 1, 2], len(whole)), ([*whole[:-1], 1], 0)):
        before = scheduler.reused
        (text,) = texts_of(scheduler, [scheduler.submit(prompt, sampling=Sampling(0.0), limit=8)])
        assert scheduler.reused - before == reused
        check_greedy(prompt, text)


def test_packed_prompts_are_those_given_alone():
    """Each prompt begins with an empty state, and its final state reaches its slot."""
    engine, params, _ = made()
    prompts = [[5, 0, 17, 2, 40, 3], [4, 4, 8, 1, 60, 2, 33]]
    prefix, result = engine.prefill_concat(params, *engine.packed(prompts), sampling=Sampling(0.0))
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [1, 0])
    drawn = {slot: [(int(result.tokens[i]), float(result.log_probs[i]))] for i, slot in enumerate([1, 0])}
    for _ in range(5):
        state, result = engine.generate(params, state)
        for slot, found in drawn.items():
            found.append((int(result.tokens[slot]), float(result.log_probs[slot])))
    for slot, prompt in zip([1, 0], prompts, strict=True):
        check_greedy(prompt, drawn[slot])
