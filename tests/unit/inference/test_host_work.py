"""The host's work in a turn of the scheduler: the programs it dispatches, and the Python functions it calls.

Programs are counted in a profile, because JAX runs most operations outside a program without calling Python functions.
"""

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest
from support import random_variables, tiny_config

from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler

STEPS, SLOTS, PROMPT = 20, 3, [5, 0, 17]
SAMPLING = Sampling(1.0, 5, 0.9)


@functools.cache
def made():
    keys = {"per_device_batch_size": SLOTS, "max_target_length": 40, "vocab_size": 64, "return_log_prob": True}
    keys |= {"base_num_decoder_layers": 1}
    engine = MaxEngine(tiny_config("nnx", **keys), jax.devices()[:1])
    return engine, engine.hold(*random_variables(engine.served.model))


def submitted(scheduler, seed, limit=None):
    scheduler.submit(PROMPT, sampling=SAMPLING, seed=seed, limit=limit)


def running(requests=1):
    """Returns a scheduler with `requests` running requests, after everything it needs is compiled."""
    scheduler = Scheduler(*made())
    submitted(scheduler, 0, limit=1)
    list(scheduler.run())
    for seed in range(requests):
        submitted(scheduler, seed)
    for _ in range(requests + 2):
        scheduler.turn()
    return scheduler


def python_calls(turn):
    """Returns how often each Python function is called: {(file, name): calls}."""
    calls = Counter()

    def count(frame, event, _):
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        turn()
    finally:
        sys.setprofile(None)
    return calls


def programs(turn, folder):
    """Returns the number of dispatches of each program. A profile has two events per dispatch: in and around the fast
    path."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the Python tracer can crash a process with other Python threads
    with jax.profiler.trace(folder, profiler_options=options):
        turn()
    (file,) = folder.rglob("*.xplane.pb")
    lines = [line for plane in jax.profiler.ProfileData.from_file(str(file)).planes for line in plane.lines]
    names = [
        event.name.partition("(")[2].rstrip(")") for line in lines for event in line.events if "PjitF" in event.name
    ]
    return {name: (calls + 1) // 2 for name, calls in Counter(names).items()}


def test_turns_trace_and_compile_nothing():
    scheduler, events = running(), []
    listener = lambda event, duration, **_: events.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for seed in range(STEPS):
            if scheduler.free_slots:
                submitted(scheduler, seed, limit=4)
            scheduler.turn()
        assert not [event for event in events if "/jax/core/compile/" in event]
        jax.jit(lambda x: x + 1)(1)
        assert {"/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"} <= set(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.rest(covered_by="what an engine compiles in unit/inference/test_controls.py")
def test_a_turn_dispatches_no_other_programs_than_those_of_the_engine(tmp_path):
    """Runs in a separate process: JAX's profiler can crash a process that has loaded many libraries."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    decode, prefill = json.loads(done.stdout)
    assert decode == {"generated": 1}
    assert prefill == {"generated": 1, "prefilled": 1, "inserted": 1}


def test_a_turn_calls_few_python_functions():
    """Measured: 64 calls with one slot in use, 3 more per further slot, and 152 with a prefill. Tracing takes
    thousands."""
    for slots in range(1, SLOTS + 1):
        calls = python_calls(running(slots).turn)
        assert sum(calls.values()) <= 80 + 4 * slots, calls
    scheduler = running()
    submitted(scheduler, 1)
    calls = python_calls(scheduler.turn)
    assert sum(calls.values()) <= 200, calls


def test_a_decode_step_calls_nothing_but_its_program():
    engine, params = made()
    state = engine.generate(params, engine.generate(params, engine.init_decode_state())[0])[0]
    calls = python_calls(lambda: engine.generate(params, state))
    assert {name for _, name in calls} == {"<lambda>", "generate"}


def main(folder):
    """Prints the programs of a turn that only decodes, and of a turn that also begins a request."""
    scheduler = running()
    decode = programs(scheduler.turn, folder / "decode")
    submitted(scheduler, 1)
    print(json.dumps([decode, programs(scheduler.turn, folder / "prefill")]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
