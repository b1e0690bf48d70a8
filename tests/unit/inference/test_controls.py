"""What requests to a server can ask for (penalties, biases and log-probabilities), and a scheduler in a thread."""

import functools
import queue
import threading

import jax
import numpy as np
import pytest
from support import random_variables, tiny_config

from trainer.config.errors import UserError
from trainer.inference.controls import NOTHING, Asked, adjusted, check_asked, controls, counted
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.inference.service import Service, warm_up

VOCABULARY, SLOTS = 300, 3
MODEL = {"max_target_length": 96, "vocab_size": VOCABULARY, "base_num_decoder_layers": 1, "use_chunked_prefill": True}
MODEL |= {"prefill_chunk_size": 32, "per_device_batch_size": SLOTS}
GREEDY, ALL = Sampling(0.0), Asked(log_probs=True, prompt_log_probs=True)


def engine_of(*, with_controls=True, **keys):
    return MaxEngine(tiny_config("nnx", **MODEL | keys), jax.devices()[:1], controls=with_controls)


@functools.cache
def made(**keys):
    """Returns an engine with controls and its variables."""
    engine = engine_of(**keys)
    return engine, engine.hold(*random_variables(engine.served.model))


def prompts(count, longest=80):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, rng.integers(2, longest)).tolist() for _ in range(count)]


def drawn(scheduler, rows, asked=NOTHING):
    """Returns the (token, log-probability) pairs drawn after each prompt. There are more prompts than slots."""
    found = {scheduler.submit(row, limit=6, sampling=GREEDY, asked=asked): [] for row in rows}
    for event in scheduler.run():
        found[event.request].append((event.token, event.log_prob))
    return list(found.values())


@pytest.mark.rest(covered_by="the case with prefixes", cases=("False",))
@pytest.mark.parametrize("caching", [False, True])
def test_a_warm_engine_compiles_nothing_more(caching):
    engine, params = made(enable_prefix_caching=caching)
    scheduler, lines = Scheduler(engine, params), []
    warm_up(scheduler, say=lines.append)
    assert lines[0].startswith(f"compiled 1 of {len(lines)}: decode steps, and prompts of up to ")
    assert lines[-1].endswith(" s")
    assert "log-probabilities of a prompt" in lines[-1]
    assert (scheduler.prefilled, scheduler.reused) == (0, 0)
    programs = (engine._prefill, engine._continue, engine._insert, engine._generate, engine._release)
    before = [program._cache_size() for program in programs]
    rows = prompts(9)
    rows += [row[: len(row) // 2] + [1, 2, 3] for row in rows]
    for asked in (NOTHING, ALL, Asked(1.0, 0.5, 1.3, {5: 2.0}), Asked(log_probs=True)):
        drawn(scheduler, rows, asked)
    assert [program._cache_size() for program in programs] == before
    assert (scheduler.reused > 0) == caching


@pytest.mark.rest(covered_by="unit/inference/test_batch_invariant.py")
def test_with_batch_invariant_all_bits_are_those_of_an_engine_without_controls():
    """Includes the log-probabilities of prompts, which are prefilled in chunks of other lengths."""
    keys = {"batch_invariant": True, "return_log_prob": True, "max_target_length": 256, "prefill_chunk_size": 64}
    plain, engine = (engine_of(with_controls=with_controls, **keys) for with_controls in (False, True))
    params = plain.hold(*random_variables(plain.served.model))
    rows = prompts(5, longest=180)
    expected = drawn(Scheduler(plain, params), rows)
    scheduler = Scheduler(engine, params)
    assert drawn(scheduler, rows, ALL) == drawn(scheduler, rows, Asked(log_probs=True)) == expected
    assert [[token for token, _ in row] for row in drawn(scheduler, rows)] == [[t for t, _ in row] for row in expected]
    for row, pairs in zip(rows, expected, strict=True):
        scheduler.submit([*row, *(token for token, _ in pairs)], limit=1, asked=ALL)
        (event,) = scheduler.run()
        assert event.prompt.log_probs[len(row) - 1 :].tolist() == [log_prob for _, log_prob in pairs]
        assert event.prompt.tokens[len(row) - 1 :, 0].tolist() == [token for token, _ in pairs]
        assert len(event.likeliest) == 20
        assert event.likeliest == sorted(event.likeliest, key=lambda pair: -pair[1])


def test_adjusted_logits():
    logits = np.array([[2.0, -1.0, 0.5, 0.0]] * 2, np.float32)
    asked = Asked(presence=0.5, frequency=0.25, repetition=2.0, bias={3: 1.5})
    it = jax.tree.map(lambda *rows: np.concatenate(rows), controls(asked, [1], 4), controls(NOTHING, [1], 4))
    count, change = jax.jit(counted), jax.jit(adjusted)
    for token in (0, 0, 2):
        it = count(it, np.array([token, token]), np.array([True, False]))
    used = np.array([True, True])
    assert it.counts.tolist() == [[2, 0, 1, 0], [0] * 4]
    assert change(logits, it, used)[0].tolist() == [2.0 / 2 - 0.5 - 0.5, -2.0, 0.25 - 0.5 - 0.25, 1.5]
    assert change(logits, it, used)[1].tolist() == logits[1].tolist()
    assert (np.asarray(change(logits, it, ~used)) == logits).all()


def test_what_may_be_asked_for():
    engine = engine_of(with_controls=False)
    scheduler = Scheduler(engine, None)
    with pytest.raises(ValueError, match="made without controls"):
        scheduler.submit([1], asked=ALL)
    bad = (Asked(presence=np.nan), Asked(repetition=0.0), Asked(bias={VOCABULARY: 1.0}), Asked(bias={1: np.inf}))
    for asked, named in zip(bad, ("presence=nan", "repetition=0.0", "token 300", "bias of token 1"), strict=True):
        with pytest.raises(UserError, match=named):
            check_asked(asked, VOCABULARY)


def test_waiting_requests_of_any_length_are_cancelled():
    engine = engine_of(with_controls=False)
    scheduler = Scheduler(engine, None)
    numbers = [scheduler.submit([1] * length) for length in (3, 5, 7)]
    assert [event.end for number in reversed(numbers) for event in scheduler.cancel(number)] == ["cancelled"] * 3
    assert scheduler.idle


def test_threads_share_a_scheduler():
    """Each request gets its own tokens. Cancelled requests end without affecting the others."""
    engine, params = made(enable_prefix_caching=True)
    rows = prompts(12)
    expected = [[token for token, _ in pairs] for pairs in drawn(Scheduler(engine, params), rows)]
    events, ended, ready = queue.Queue(), queue.Queue(), threading.Event()
    scheduler = Scheduler(engine, params)
    service = Service(scheduler, lambda batch: events.put(batch) if batch else ready.set(), ended.put)
    service.start()
    assert ready.wait(120)
    numbers = {}

    def submit(of):
        for i in of:
            numbers[service.submit(rows[i], limit=6, sampling=GREEDY)] = i
            service.cancel(service.submit(rows[i][::-1]))

    threads = [threading.Thread(target=submit, args=(range(k, 12, 3),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, left = {i: [] for i in range(12)}, 24
    while left:
        for event in events.get(timeout=60):
            left -= event.end is not None
            if event.request in numbers:
                found[numbers[event.request]].append(event.token)
    service.stop()
    assert ended.get(timeout=10) is None
    assert list(found.values()) == expected
    assert scheduler.free_slots == SLOTS


def test_the_thread_ends_between_two_programs_while_it_compiles():
    engine, params = made.__wrapped__()
    ended = queue.Queue()
    service = Service(Scheduler(engine, params), ended.put, ended.put)
    service.start()
    service.stop()
    assert ended.get(timeout=1) is None
    assert engine._generate._cache_size() <= 1
    assert ended.empty()  # it never became ready
