"""The engine against full forward passes: prefill, chunks, packed prompts, samples, reused slots."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arguments, model_of, random_variables, tiny_config

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling, sampling_key
from trainer.inference.scheduler import Event, Scheduler

LENGTH, VOCABULARY, SLOTS = 40, 64, 3
MODEL = {"max_target_length": LENGTH, "vocab_size": VOCABULARY, "logits_via_embedding": True, "return_log_prob": True}
GREEDY = {"decode_sampling_strategy": "greedy"}
KINDS = {
    "all positions": {"decode_sampling_temperature": 3.0},
    "window": {"attention_type": "local_sliding", "sliding_window_size": 7, "use_chunked_prefill": True}
    | {"prefill_chunk_size": 5, **GREEDY},
    "gpt3": {"decoder_block": "gpt3", "base_num_kv_heads": 4, "mlp_activations": "[gelu]", "fused_qkv": True}
    | {"trainable_position_size": LENGTH, "use_chunked_prefill": True, "prefill_chunk_size": 5, **GREEDY},
}
PROMPT = [5, 0, 17]
# A share of the largest log-probability, for float32 sums in another order, after scores that are scaled tenfold. The
# largest difference on processors with AVX2 and AVX-512 was 2.4e-7.
ROUNDING = 2e-6


def config_of(kind):
    return tiny_config("nnx", per_device_batch_size=SLOTS, **MODEL, **KINDS[kind])


@functools.cache
def variables_of(kind="all positions"):
    """Canonical variables, on the host, with which the likeliest token is far ahead of the second."""
    params, rest = random_variables(model_of(config_of(kind)))
    # Random signs, so that the tied head does not just repeat the last token.
    signs = np.sign(np.random.default_rng(0).normal(size=16)).astype(np.float32)
    norm, layers = params["decoder"]["decoder_norm"], params["decoder"]["layers"]
    attention = layers["self_attention"]
    # Sharper scores make the result depend on the context.
    if kind == "gpt3":
        norm["scale"] = 16 * signs - 1  # the layer adds 1 to the scale, and the logits are divided by sqrt(width)
        attention["qkv_proj"]["kernel"][:, :, 0] *= 10
    else:
        layers["pre_self_attention_layer_norm"]["scale"][:] = layers["post_self_attention_layer_norm"]["scale"][:] = 1
        params["token_embedder"]["embedding"] *= 3
        norm["scale"] = 4 * signs
        attention["query"]["kernel"] *= 10
    return params, rest


@functools.cache
def made(kind="all positions"):
    """Returns an engine with three slots, and its variables."""
    engine = MaxEngine(config_of(kind), jax.devices()[:1])
    return engine, engine.hold(*variables_of(kind))


@functools.cache
def _forward(kind):
    model = made(kind)[0].served.model

    @jax.jit
    def forward(variables, tokens):
        positions = jnp.arange(LENGTH)[None]
        hidden = model.apply(*variables, tokens, positions, jnp.ones_like(positions), jnp.zeros(1, int))[0]
        return jax.nn.log_softmax(model.apply(*variables, hidden, method="head")[0][0])

    return functools.partial(forward, variables_of(kind))


def log_probs_after(tokens, kind="all positions"):
    """Returns the log-probabilities [v] of the token after `tokens`, from one forward pass without a cache."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_forward(kind)(row))[len(tokens) - 1]


def texts_of(scheduler, **requests):
    """Runs all requests together and returns the (token, log-probability) pairs of each."""
    found = {number: [] for number in requests.values()}
    for event in scheduler.run():
        if event.token is not None:
            found[event.request].append((event.token, event.log_prob))
    return {name: found[number] for name, number in requests.items()}


def check_greedy(prompt, drawn, kind="all positions"):
    """Checks that each token is the likeliest after its predecessors, and its log-probability."""
    tokens = list(prompt)
    assert drawn
    for token, log_prob in drawn:
        expected = log_probs_after(tokens, kind)
        assert token == expected.argmax()
        assert log_prob == pytest.approx(expected[token], abs=ROUNDING * float(np.abs(expected).max()))
        tokens.append(token)


PROMPTS = {"short": PROMPT, "long": list(range(1, 34)), "one": [9], "full": [3] * (LENGTH - 1), "bucket": [7, 8] * 8}


@pytest.mark.rest(covered_by="the other kinds; decoding in unit/models/test_gpt3.py", cases=("gpt3",))
@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_than_slots_get_the_tokens_of_full_forward_passes(kind):
    """With a window, the ring is shorter than the text, and the prefill chunks are shorter than the ring. GPT-3 is
    prefilled in chunks, too."""
    engine, params = made(kind)
    assert engine.max_concurrent_decodes == SLOTS
    scheduler = Scheduler(engine, params)
    numbers = {name: scheduler.submit(prompt, sampling=Sampling(0.0)) for name, prompt in PROMPTS.items()}
    texts = texts_of(scheduler, **numbers)
    for name, prompt in PROMPTS.items():
        assert len(texts[name]) == LENGTH - len(prompt)
        check_greedy(prompt, texts[name], kind)
    assert len({token for token, _ in texts["short"]}) > 4, "the continuation should not be one token over and over"
    assert scheduler.free_slots == SLOTS
    places = {leaf.shape[2] for leaf in jax.tree.leaves(engine.init_decode_state().cache)}
    assert places == {KINDS[kind].get("sliding_window_size", LENGTH)}


def test_the_first_token_does_not_wait_for_decode_steps():
    """The decode step may still have to be compiled. With fill=True, when nobody waits for text, prompts are prefilled
    together instead."""
    engine, params = made()
    scheduler = Scheduler(engine, params)
    first = scheduler.submit(PROMPT, limit=3)
    second = scheduler.submit([9], limit=3)
    assert [event.request for event in scheduler.turn()] == [first]
    assert not scheduler._unread
    assert scheduler.turn() == []  # `second` is prefilled, and the running step decodes both
    assert [event.request for event in scheduler.turn()] == [second, first, second]
    filled = Scheduler(engine, params, fill=True)
    filled.submit(PROMPT, limit=3)
    assert filled.turn() == []


def test_what_the_window_hides_is_far_beyond_the_tolerance():
    assert np.abs(log_probs_after(PROMPTS["long"]) - log_probs_after(PROMPTS["long"], "window")).max() > 1e-2


def test_a_request_draws_the_same_tokens_alone_and_with_others():
    engine, params = made()
    sampled = {"sampling": Sampling(1.0, 20, 0.9), "seed": 7}
    alone = Scheduler(engine, params)
    expected = texts_of(alone, it=alone.submit(PROMPT, **sampled))["it"]
    busy = Scheduler(engine, params)
    others = {f"other {i}": busy.submit([i] * (1 + 3 * i), limit=4 + i, seed=i) for i in range(5)}
    texts = texts_of(busy, it=busy.submit(PROMPT, **sampled), **others)
    assert [token for token, _ in texts["it"]] == [token for token, _ in expected]
    assert [len(texts[f"other {i}"]) for i in range(5)] == [4, 5, 6, 7, 8]
    greedy = Scheduler(engine, params)
    other = texts_of(greedy, it=greedy.submit(PROMPT, **sampled | {"seed": 8}))["it"]
    assert [token for token, _ in other] != [token for token, _ in expected]


@pytest.mark.parametrize("kind", ["all positions", "gpt3"])
def test_packed_prompts_are_those_given_alone(kind):
    engine, params = made(kind)
    prompts = [[5, 0, 17], [9], [4, 4, 8, 1, 60, 2, 33]]
    prefix, result = engine.prefill_concat(params, *engine.packed(prompts), sampling=Sampling(0.0))
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [2, 0, 1])
    drawn = {slot: [(int(result.tokens[i]), float(result.log_probs[i]))] for i, slot in enumerate([2, 0, 1])}
    for _ in range(5):
        state, result = engine.generate(params, state)
        for slot, found in drawn.items():
            found.append((int(result.tokens[slot]), float(result.log_probs[slot])))
    assert result.valid.all()
    assert result.lengths.tolist() == [6, 6, 6]
    for slot, prompt in zip([2, 0, 1], prompts, strict=True):
        check_greedy(prompt, drawn[slot], kind)


def test_prompts_packed_as_maxtext_packs_them_give_the_same_tokens():
    """Segment numbers need not be consecutive, nor prompts adjacent. The arrays of prompts are padded to the number of
    slots."""
    engine, params = made()
    prompts = [[5, 0, 17], [9, 2], [4]]
    expected = engine.prefill_concat(params, *engine.packed(prompts), sampling=Sampling(0.0))
    row = {"padded_tokens": [5, 0, 17, 1, 1, 9, 2, 4], "decoder_positions": [0, 1, 2, 0, 0, 0, 1, 0]}
    row |= {"decoder_segment_ids": [1, 1, 1, 0, 0, 3, 3, 2]}
    row = {name: jnp.array(values + [0] * 8) for name, values in row.items()}
    row |= {"start_pos": jnp.array([0, 5, 7, 0]), "true_lengths": jnp.array([3, 2, 1, 0])}
    found = engine.prefill_concat(params=params, num_prompts=3, **row, sampling=Sampling(0.0))
    np.testing.assert_array_equal(found[1].tokens, expected[1].tokens)
    np.testing.assert_array_equal(found[0].sequences.positions, [3, 2, 1])  # of the drawn tokens
    for i, prompt in enumerate(prompts):
        caches = (jax.tree.leaves(jax.device_get(it[0].cache)) for it in (found, expected))
        for leaf, other in zip(*caches, strict=True):
            # Float32 sums in another order.
            np.testing.assert_allclose(
                leaf[:, i, : len(prompt)], other[:, i, : len(prompt)], atol=ROUNDING * np.abs(other).max()
            )


def test_several_samples_are_those_of_separate_requests_with_the_same_keys():
    engine, params = made()
    prefix, first = engine.prefill_multisampling(params, engine.padded(PROMPT), len(PROMPT), 3, seed=5)
    assert {leaf.shape[1] for leaf in jax.tree.leaves(prefix.cache)} == {1}  # the samples share the prompt's cache
    state = engine.bulk_insert(prefix, engine.init_decode_state(), [0, 1, 2])
    together = [first.tokens]
    for _ in range(6):
        state, result = engine.generate(params, state)
        together.append(result.tokens)
    together = np.stack(together, axis=1)
    assert len({row.tobytes() for row in together}) == 3
    for i in range(3):
        prefix, first = engine.prefill(params, engine.padded(PROMPT), len(PROMPT), seed=5)
        key = jax.random.key_data(sampling_key(5, i))[None]
        if i == 0:
            np.testing.assert_array_equal(prefix.sequences.keys, key)
            assert int(first.tokens[0]) == together[0, 0]
        # Continues with the first token that was drawn above, and with the key of sample i.
        sequences = prefix.sequences._replace(keys=key, tokens=jnp.asarray(together[i, :1]))
        state = engine.insert(prefix._replace(sequences=sequences), engine.init_decode_state(), 1)
        for t in range(1, 7):
            state, result = engine.generate(params, state)
            assert int(result.tokens[1]) == together[i, t]
            assert result.valid.tolist() == [False, True, False]


def test_with_chunks_a_first_part_has_room_for_the_longest_prompt():
    engine, params = made("gpt3")
    prefix, _ = jax.eval_shape(lambda: engine.prefill(params, engine.padded(PROMPT), len(PROMPT)))
    assert {array.shape[2] for array in jax.tree.leaves(prefix.cache)} == {engine.max_prefill_length}


def test_parts_of_a_prompt_give_what_the_prompt_gives():
    engine, params = made()
    prompt = PROMPTS["long"]
    expected = engine.prefill(params, engine.padded(prompt), len(prompt), sampling=Sampling(0.0))[1]
    prefix = None
    how = {"sampling": Sampling(0.0), "room": engine.max_prefill_length}
    for part in (prompt[:11], prompt[11:20], prompt[20:]):
        prefix, result = engine.prefill(params, engine.padded(part), len(part), existing_prefix=prefix, **how)
    assert int(prefix.sequences.positions[0]) == len(prompt)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    largest = np.abs(log_probs_after(prompt)).max()
    np.testing.assert_allclose(result.log_probs, expected.log_probs, atol=ROUNDING * largest)


def test_a_text_ends_with_its_row_and_a_released_slot_is_not_valid():
    engine, params = made()
    prompt = [1] * (LENGTH - 2)
    prefix, _ = engine.prefill(params, engine.padded(prompt), len(prompt))
    state = engine.insert(prefix, engine.init_decode_state(), 0)
    valid = []
    for _ in range(3):
        state, result = engine.generate(params, state)
        valid.append(bool(result.valid[0]))
    assert valid == [True, False, False]
    prefix, _ = engine.prefill(params, engine.padded(PROMPT), len(PROMPT))
    state = engine.release(engine.insert(prefix, state, 0), 0)
    assert not engine.generate(params, state)[1].valid.any()


def test_requests_stop_at_their_tokens_and_are_cancelled_wherever_they_are():
    engine, params = made()
    scheduler = Scheduler(engine, params)
    first = log_probs_after(PROMPT).argmax()
    second = log_probs_after([*PROMPT, first]).argmax()
    stopping = scheduler.submit(PROMPT, stop=[second], sampling=Sampling(0.0))
    running, waiting = scheduler.submit([9]), [scheduler.submit([2]) for _ in range(4)]
    events = [*scheduler.turn(), *scheduler.turn(), *scheduler.turn()]
    assert scheduler.cancel(running) == [Event(running, None, end="cancelled")]
    assert scheduler.cancel(waiting[-1]) == [Event(waiting[-1], None, end="cancelled")]
    assert scheduler.cancel(running) == scheduler.cancel(99) == []
    events += scheduler.run()
    of = {number: [event for event in events if event.request == number] for number in (stopping, running, *waiting)}
    assert [(event.token, event.end) for event in of[stopping]] == [(first, None), (None, "stop")]
    assert of[waiting[-1]] == []
    assert all(event.end is None for event in of[running])
    assert all(it[-1].end == "length" and len(it) == LENGTH - 1 for it in map(of.get, waiting[:-1]))
    assert scheduler.idle
    assert scheduler.free_slots == SLOTS
    assert scheduler.turn() == []


def test_the_slot_of_a_request_that_ended_is_not_valid():
    """A request can end by its limit, a stop token or `cancel`."""
    engine, params = made()
    scheduler = Scheduler(engine, params)
    first = log_probs_after(PROMPT).argmax()
    scheduler.submit(PROMPT, limit=2)
    scheduler.submit(PROMPT, stop=[first], sampling=Sampling(0.0))
    cancelled, running = scheduler.submit([9]), scheduler.submit([2])
    used = []
    for turn in range(5):
        scheduler.turn()
        if turn == 3:
            scheduler.cancel(cancelled)
        used.append(scheduler._state.sequences.used.tolist())
        assert used[-1] == [slot in scheduler._slots for slot in range(SLOTS)]
    scheduler.turn()
    assert [request.number for request in scheduler._slots.values()] == [running]
    assert sum(scheduler._unread[-1].result.valid.tolist()) == 1


def test_mistakes_of_a_caller():
    engine, params = made()
    scheduler = Scheduler(engine, params)
    for prompt in ([], [1] * LENGTH):
        with pytest.raises(ValueError, match=f"1 to {LENGTH - 1} tokens; {len(prompt)} were given"):
            scheduler.submit(prompt)
    padded = engine.padded(PROMPT)
    for length in (0, padded.size + 1):
        with pytest.raises(ValueError, match=f"true_length={length}: allowed: 1 to {padded.size}"):
            engine.prefill(params, padded, length)
    for room in (len(PROMPT) - 1, LENGTH + 1):
        with pytest.raises(ValueError, match=f"room={room}: allowed: {len(PROMPT)} to {LENGTH}"):
            engine.prefill(params, padded, len(PROMPT), room=room)
    prefix, _ = jax.eval_shape(lambda: engine.prefill(params, padded, len(PROMPT), room=5))
    prefix = jax.tree.map(lambda it: np.full(it.shape, len(PROMPT), it.dtype), prefix)
    with pytest.raises(ValueError, match="room for 5 tokens, but needs 6"):
        engine.prefill(params, padded, len(PROMPT), existing_prefix=prefix)
    with pytest.raises(ValueError, match="limit=0: must be at least 1"):
        scheduler.submit([1], limit=0)
    with pytest.raises(ValueError, match="at least one token"):
        engine.packed([[1], []])
    prefix, _ = jax.eval_shape(lambda: engine.prefill(params, padded, len(PROMPT), num_samples=2))
    for slots in ([0], [0, 0], [0, SLOTS], [-1, 0]):
        with pytest.raises(ValueError, match="2 sequences need as many different slots below 3"):
            engine.bulk_insert(prefix, engine.init_decode_state(), slots)
    with pytest.raises(UserError, match="tokenizer_path is empty"):
        engine.get_tokenizer()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sampling": Sampling(nucleus_p=0)}, r"nucleus_p=0.0: allowed: a number in \(0, 1\]"),
        ({"sampling": Sampling(nucleus_p=1e-60)}, r"nucleus_p=0.0"),
        ({"sampling": Sampling(nucleus_p=1.5)}, r"nucleus_p=1.5"),
        ({"sampling": Sampling(temperature=-1)}, r"temperature=-1.0: allowed: 0 \(greedy\)"),
        ({"sampling": Sampling(float("nan"), -5, float("nan"))}, r"(?s)temperature=nan.*top_k=-5.*nucleus_p=nan"),
        ({"sampling": Sampling(temperature=float("inf"))}, r"temperature=inf"),
        ({"sampling": Sampling(top_k=1.5)}, r"top_k=1.5: allowed: 0 \(all tokens\)"),
        ({"sampling": Sampling(top_k=2**31)}, r"top_k=2147483648"),
        ({"seed": -1}, r"seed=-1: allowed: an integer in \[0, 4294967295\]"),
        ({"seed": 2**32}, r"seed=4294967296"),
        ({"tokens": [1, -1]}, f"the prompt has the token -1: allowed: integers from 0 to {VOCABULARY - 1}"),
        ({"tokens": [VOCABULARY]}, f"token {VOCABULARY}"),
        ({"tokens": [2**40]}, f"token {2**40}"),
        ({"tokens": [0.5]}, r"token (0.5|1.0): allowed: integers"),
    ],
)
def test_what_no_text_can_be_drawn_with_is_refused(how, message):
    engine, params = made()
    scheduler = Scheduler(engine, params)
    with pytest.raises(UserError, match=message):
        scheduler.submit(**{"tokens": PROMPT} | how)
    assert scheduler.idle
    if "tokens" in how:
        with pytest.raises(UserError, match=message):
            engine.packed([[1], how["tokens"]])
    else:
        with pytest.raises(UserError, match=message):
            engine.prefill(params, engine.padded(PROMPT), len(PROMPT), **how)


@pytest.mark.parametrize("key", ["ici_pipeline_parallelism", "dcn_pipeline_parallelism"])
def test_stages_of_a_pipeline_are_refused(key):
    config = load(arguments("nnx", **MODEL | {key: 2})).config
    with pytest.raises(UserError, match=f"^{key}=2: generation has no pipeline; assign the devices to data, fsdp or"):
        MaxEngine(config, jax.devices()[:2])


def test_prompts_are_padded_to_few_lengths():
    engine, _ = made()
    assert engine.rows.buckets == [16, 32, LENGTH - 1]
    assert [engine.padded([1] * n).size for n in (1, 16, 17, 33)] == [16, 16, 32, LENGTH - 1]
    shorter = MaxEngine(tiny_config("nnx", max_prefill_predict_length=20, **MODEL), jax.devices()[:1])
    assert shorter.rows.buckets == [16, 20]


def test_a_kept_prefix_saves_its_tokens_and_changes_nothing():
    engine, params = made()
    scheduler = Scheduler(_with(engine, enable_prefix_caching=True, prefix_caching_hbm_byte=31_000), params)
    known = scheduler._prefixes
    calls = []
    prefill = scheduler.engine.prefill
    scheduler.engine.prefill = lambda params, tokens, size, **how: (
        calls.append(size) or prefill(params, tokens, size, **how)
    )
    prompts = [PROMPTS["long"], [*PROMPTS["long"][:20], 50, 51], PROMPTS["long"], [60, *PROMPTS["long"]]]
    for prompt in prompts:
        drawn = texts_of(scheduler, it=scheduler.submit(prompt, limit=5, sampling=Sampling(0.0)))["it"]
        check_greedy(prompt, drawn)
    assert calls == [33, 2, 1, 34]
    assert 0 < known.size <= 31_000
    one = known.size // 3
    assert known.size == 3 * one  # equal prompts are stored once
    known._limit = 2 * one
    texts_of(scheduler, it=scheduler.submit([7, 7], limit=1))
    assert known.size == 2 * one  # the two most recently used
    assert known.get(np.array([60, 1, 2, 9], np.int32))[1] == 3
    assert known.get(np.array(PROMPTS["long"], np.int32)) == (None, 0)


def _with(engine, **keys):
    """Returns the same engine with other values of keys that no compiled function reads."""
    other = MaxEngine.__new__(MaxEngine)
    other.__dict__ |= engine.__dict__ | {"config": type(engine.config)(dict(engine.config.items()) | keys)}
    return other


def test_a_longer_prefix_in_a_ring_is_used_only_whole():
    engine, params = made("window")
    scheduler = Scheduler(_with(engine, enable_prefix_caching=True), params)
    scheduler.submit(PROMPTS["long"], limit=1)
    list(scheduler.run())
    prompt = np.array([*PROMPTS["long"][:20], 50], np.int32)
    assert scheduler._prefixes.get(prompt) == (None, 0)
    longer = [*PROMPTS["long"], 50, 51]
    assert scheduler._prefixes.get(np.array(longer, np.int32))[1] == 33
    drawn = texts_of(scheduler, it=scheduler.submit(longer, limit=5, sampling=Sampling(0.0)))["it"]
    check_greedy(longer, drawn, "window")


def test_on_eight_devices_it_draws_the_same_text():
    """The axes that shard rows in training shard the sequences. test_batch_invariant.py tests text with a data axis."""
    for axis in ("data", "context"):
        axes = {f"ici_{name}_parallelism": 2 for name in (axis, "fsdp", "tensor")}
        config = tiny_config("nnx", devices=8, per_device_batch_size=1, **MODEL, **axes)
        sharded = MaxEngine(config, jax.devices())
        assert sharded.max_concurrent_decodes == 8
        specs = {leaf.sharding.spec for leaf in jax.tree.leaves(sharded.parts()["cache"])}
        assert {str(spec) for spec in specs} == {str(next(iter(specs)))}
        assert all(name in str(specs) for name in (axis, "fsdp", "tensor"))
        assert MaxEngine(config, jax.devices(), sequences=3).max_concurrent_decodes == 4  # axis x fsdp
    scheduler = Scheduler(sharded, sharded.load_params(variables_of()[0]))
    numbers = {f"{i}": scheduler.submit([i, 3, 5, 9], sampling=Sampling(0.0), limit=12) for i in range(3)}
    for name, drawn in texts_of(scheduler, **numbers).items():
        check_greedy([int(name), 3, 5, 9], drawn)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(scheduler._state.cache)} == specs


def test_devices_that_share_a_row_in_training_have_one_each():
    axes = {"ici_context_parallelism": 4, "ici_fsdp_parallelism": 2}
    config = tiny_config("nnx", devices=8, per_device_batch_size=0.25, **MODEL, **axes)
    assert MaxEngine(config, jax.devices()).max_concurrent_decodes == 8


def test_a_decode_step_is_compiled_ahead_of_time_with_its_memory():
    """Exact bytes of weights and cache, no copy of the cache, and memory traffic close to reading both once."""
    length = 4096  # so that the cache is larger than everything else
    keys = MODEL | {"max_target_length": length, "base_num_decoder_layers": 4, **GREEDY}
    engine = MaxEngine(tiny_config("nnx", per_device_batch_size=8, **keys), jax.devices()[:1])
    compiled, report = engine.aot_compile()
    sizes = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for name, part in engine.parts().items()
    }
    assert report.state == sizes
    assert sizes["cache"] == 4 * 2 * 8 * length * 2 * 8 * 4  # layers, keys and values, slots, length, heads, width
    assert report.memory.temporaries < sizes["cache"] / 2
    assert report.memory.aliased >= sizes["cache"]
    # A CPU transposes the keys and values of a layer before the product; a TPU fuses the transposition.
    assert sizes["cache"] < report.cost.bytes_accessed < 5 * sizes["cache"]
    params = engine.hold(*random_variables(engine.served.model))
    _, result = compiled(params, engine.init_decode_state())
    assert not result.valid.any()


def test_samples_of_a_prompt_are_those_of_as_many_requests_and_are_cancelled_one_by_one():
    engine, params = made()
    sampled, single = Scheduler(engine, params, fill=True), Scheduler(engine, params)
    first = sampled.submit(PROMPT, seed=3, limit=5, samples=SLOTS)
    events = list(sampled.run())
    prefix, result = engine.prefill_multisampling(params, engine.padded(PROMPT), 3, SLOTS, seed=3)
    state = engine.bulk_insert(prefix, engine.init_decode_state(), range(SLOTS))
    tokens = [result.tokens]
    for _ in range(4):
        state, result = engine.generate(params, state)
        tokens.append(result.tokens)
    expected = np.stack(tokens, axis=1).tolist()
    assert [[e.token for e in events if e.request == first + i] for i in range(SLOTS)] == expected
    number = single.submit(PROMPT, seed=3, limit=5)
    assert [event.token for event in single.run() if event.request == number] == expected[0]
    with pytest.raises(ValueError, match="has 3 slots"):
        sampled.submit(PROMPT, samples=SLOTS + 1)
    # The samples need all slots, so they wait in the queue, where one of them is cancelled.
    sampled.submit([9], limit=30)
    waiting = sampled.submit(PROMPT, seed=3, limit=5, samples=SLOTS)
    assert [event.end for event in sampled.cancel(waiting + 1)] == ["cancelled"]
    assert sampled.cancel(waiting + 1) == []
    events = list(sampled.run())
    found = [[e.token for e in events if e.request == waiting + i] for i in range(SLOTS)]
    assert found == [expected[0], [], expected[2]]
    assert sampled.free_slots == SLOTS
    queued = [sampled.submit([2], samples=SLOTS) for _ in range(2)][1]
    assert [sampled.cancel(queued + i)[0].end for i in range(SLOTS)] == ["cancelled"] * SLOTS
    list(sampled.run())
    assert sampled.idle
