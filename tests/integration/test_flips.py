"""The flags may be flipped in the middle of a run: nothing is converted, and nothing changes, to the last bit."""

import functools
import shutil

import pytest
from run_cases import RUN, SETTINGS, assert_equal, train
from support import ALL_COMBINATIONS

from trainer.config.flags import FLAGS

HALF = 10
RUNS = SETTINGS | {"steps": 2 * HALF, "learning_rate_schedule_steps": 3 * HALF, "eval_interval": -1}


def run(folder, combination, **keys):
    code, output = train(folder, "run_name=run-0001", combination=combination, **RUNS | keys)
    assert code == 0, output
    return folder / RUN


# States of other structures and shapes: two moments, one for some parameters, sums over rows and over columns.
OPTIMIZERS = (
    {},
    {"opt_type": "muon", "learning_rate": 0.01, "muon_consistent_rms": 0.2},
    {"opt_type": "adafactor", "learning_rate": 0.01, "adafactor_min_dim_size_to_factor": 8},
)


def optimizer_of(combination):
    """A run that begins under `combination` has this one of OPTIMIZERS."""
    return ALL_COMBINATIONS.index(combination) % len(OPTIMIZERS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Runs under the first combination that nobody flipped, one for each optimizer."""

    @functools.cache
    def made(optimizer):
        steps = 2 * HALF if optimizer else 3 * HALF
        return run(tmp_path_factory.mktemp("straight"), ALL_COMBINATIONS[0], steps=steps, **OPTIMIZERS[optimizer])

    return made


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The first half under each combination."""
    found = {}
    for combination in ALL_COMBINATIONS:
        keys = OPTIMIZERS[optimizer_of(combination)]
        found[combination] = run(tmp_path_factory.mktemp(combination), combination, steps=HALF, **keys)
    return found


# What a checkpoint says in addition to its arrays; times of saving and random names of files are left out.
SAID = ("state/_METADATA", "state/_sharding", "run/data.json", "run/metrics.json", "run/config.yml")


def said(run, updates):
    """Those files, by name, without the flags and the steps of the run that wrote the checkpoint."""
    own = ("steps:", *(f"{flag}:" for flag in FLAGS))
    lines = {name: (run / f"checkpoints/{updates}" / name).read_text().splitlines() for name in SAID}
    return {name: [line for line in text if not line.startswith(own)] for name, text in lines.items()}


def assert_same(flipped, straight, updates):
    """Losses, parameters, optimizer and step, and the position in the data."""
    assert_equal(flipped, straight, updates)
    assert said(flipped, updates)["run/data.json"] == said(straight, updates)["run/data.json"]


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_checkpoint_of_the_first_half(combination, halves, straight):
    """It is the same under each, so that it does not matter which one a run comes from."""
    first = straight(optimizer_of(combination))
    assert_equal(halves[combination], first, HALF)
    assert said(halves[combination], HALF) == said(first, HALF)


@pytest.mark.parametrize(
    ("first", "second"), list(zip(ALL_COMBINATIONS, (*ALL_COMBINATIONS[1:], ALL_COMBINATIONS[0]), strict=True))
)
def test_half_under_one_and_half_under_the_next(first, second, halves, straight, tmp_path):
    """Every combination once on each side; with the test above that stands for all pairs. The optimizers take turns:
    the states of all of optax are in tests/unit/backends/test_codec.py and tests/unit/checkpoint/test_manager.py."""
    shutil.copytree(halves[first], tmp_path / RUN)
    optimizer = optimizer_of(first)
    assert_same(run(tmp_path, second, **OPTIMIZERS[optimizer]), straight(optimizer), 2 * HALF)


def test_there_and_back(straight, tmp_path):
    """The last combination of the table, the first, the last; by command line the guide does so, whose commands CI
    runs."""
    there, back = ALL_COMBINATIONS[-1], ALL_COMBINATIONS[0]
    for leg, combination in enumerate((there, back, there), 1):
        run(tmp_path, combination, steps=leg * HALF)
    assert_same(tmp_path / RUN, straight(0), 3 * HALF)
