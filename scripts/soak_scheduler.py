"""Stress-tests trainer.inference's scheduler: many requests of mixed lengths on few slots, some of them cancelled.

    python scripts/soak_scheduler.py RUN [--requests 1000] [--slots 8] [key=value ...]

The script compares every answer with the answer that the same request gets when it runs alone. Where two answers first
differ, the log-probabilities of the two tokens must be nearly equal; the script prints each such near tie. It also
checks that no slot is lost, and prints the memory of live arrays, which should not grow.
"""

import argparse
import time

import jax
import numpy as np

from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler

TIE = 1e-3  # near tie if log-probabilities differ by less; reordering float32 sums changes them by less than 1e-4


def main() -> None:
    """Runs the test and prints its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_intermixed_args()
    keys = [f"load_parameters_path={given.run}", f"per_device_batch_size={given.slots}", "return_log_prob=true"]
    engine = MaxEngine(load(["base.yml", "dataset_type=synthetic", "prompt=", *keys, *given.keys]).config)
    params = engine.load_params()
    rng = np.random.default_rng(given.seed)
    requests = [request(rng, engine) for _ in range(given.requests)]

    began = time.perf_counter()
    answers, arrays, turns, cut = soak(engine, params, requests, rng)
    seconds = time.perf_counter() - began
    tokens = sum(map(len, answers.values()))
    print(f"{len(requests)} requests, {given.slots} slots: {tokens} tokens, {turns} turns, {seconds:.1f} s")
    print(f"cut off: {len(cut)}; slots free at the end: all {given.slots}")
    print(f"live arrays after 10, 50 and 100 % of the turns: {' '.join(f'{size / 1e6:.2f} MB' for size in arrays)}")

    equal = ties = 0
    alone = Scheduler(engine, params)
    for number, drawn in answers.items():
        expected = answer_alone(alone, requests[number])
        part = expected[: len(drawn)] if number in cut else expected
        first = next((i for i, (a, b) in enumerate(zip(drawn, part, strict=False)) if a[0] != b[0]), None)
        if first is None:
            assert len(drawn) == len(part), f"request {number}: {len(drawn)} tokens, {len(part)} alone"
            equal += 1
            continue
        apart = abs(drawn[first][1] - part[first][1])
        assert apart < TIE, f"request {number} differs at token {first} by {apart:.2g}"
        ties += 1
        print(f"  request {number} differs at token {first}, a near tie: log-probabilities {apart:.1e} apart")
    print(f"answers equal to those of the requests alone: {equal}; different after a near tie: {ties}")


def request(rng, engine) -> dict:
    """Returns a random request, greedy or sampled. Its prompt and its continuation have at most half of
    max_target_length tokens each."""
    half = engine.config.max_target_length // 2
    prompt = rng.integers(0, engine.config.vocab_size, rng.integers(1, min(half, engine.max_prefill_length) + 1))
    sampling = Sampling(0.0) if rng.random() < 0.5 else Sampling(float(rng.uniform(0.5, 1.5)), int(rng.integers(0, 50)))
    limit, seed = int(rng.integers(1, half)), int(rng.integers(2**31))
    return {"tokens": prompt.tolist(), "limit": limit, "sampling": sampling, "seed": seed}


def soak(engine, params, requests, rng):
    """Runs all requests, and cancels a tenth of them.

    Returns:
      Four values: a dict from each request's number to its (token, log-probability) pairs; the bytes of live arrays
      after 10, 50 and 100 % of the calls of `Scheduler.turn`; the number of these calls; and the numbers of the
      cancelled requests.
    """
    scheduler = Scheduler(engine, params)
    numbers = [scheduler.submit(it["tokens"], **{k: v for k, v in it.items() if k != "tokens"}) for it in requests]
    assert numbers == list(range(len(requests)))
    answers: dict[int, list] = {number: [] for number in numbers}
    to_cut = {int(n): int(rng.integers(1, 20)) for n in rng.choice(numbers, len(numbers) // 10, replace=False)}
    cut, sizes, turns = set(), [], 0
    while not scheduler.idle:
        for event in scheduler.turn():
            assert event.request not in cut, "an event of a cancelled request"
            if event.token is not None:
                answers[event.request].append((event.token, event.log_prob))
        for number, after in to_cut.items():
            if number not in cut and len(answers[number]) >= after and scheduler.cancel(number):
                cut.add(number)
        turns += 1
        if turns % 100 == 0:
            sizes.append(sum(array.nbytes for array in jax.live_arrays()))
    assert scheduler.free_slots == engine.max_concurrent_decodes, "a slot was lost"
    return answers, [sizes[len(sizes) // 10], sizes[len(sizes) // 2], sizes[-1]], turns, cut


def answer_alone(scheduler, it):
    """Returns the (token, log-probability) pairs of a request that runs alone."""
    scheduler.submit(it["tokens"], limit=it["limit"], sampling=it["sampling"], seed=it["seed"])
    return [(event.token, event.log_prob) for event in scheduler.run() if event.token is not None]


if __name__ == "__main__":
    main()
