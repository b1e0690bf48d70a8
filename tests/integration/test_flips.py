"""The flags may change in the middle of a run: nothing is converted, and no bit changes."""

import re

import pytest
from run_cases import RUN, SETTINGS, assert_equal, train
from support import ALL_COMBINATIONS

from trainer.config.flags import FLAGS

LEG = 5
# The order of combinations, which ends with the first. Each combination resumes from another's checkpoint and is
# resumed by another.
LEGS = (*ALL_COMBINATIONS, ALL_COMBINATIONS[0])
STEPS = LEG * len(LEGS)
# Keeps AdamW's two moments for some parameters, and Muon's one for the others. States of other optimizers are tested in
# tests/unit/backends/test_codec.py and tests/unit/checkpoint/test_manager.py.
MUON = {"opt_type": "muon", "learning_rate": 0.01, "muon_consistent_rms": 0.2}
RUNS = SETTINGS | MUON | {"learning_rate_schedule_steps": STEPS, "checkpoint_period": LEG, "eval_interval": -1}

# A checkpoint's files other than arrays. Save times and random file names are left out.
SAID = ("state/_METADATA", "state/_sharding", "run/data.json", "run/metrics.json", "run/config.yml")


def run(folder, combination, steps):
    folder.mkdir(exist_ok=True)
    code, output = train(folder, "run_name=run-0001", combination=combination, **RUNS | {"steps": steps})
    assert code == 0, output
    assert re.search(rf"^combination +{combination}$", output, re.MULTILINE)
    return folder / RUN


def said(run, updates):
    """Returns the contents of these files by name, without the flags and step numbers of the run that wrote them."""
    own = ("steps:", *(f"{flag}:" for flag in FLAGS))
    lines = {name: (run / f"checkpoints/{updates}" / name).read_text().splitlines() for name in SAID}
    return {name: [line for line in text if not line.startswith(own)] for name, text in lines.items()}


@pytest.mark.rest(covered_by="a run that goes on under another combination in integration/test_diloco.py")
def test_a_run_that_changes_its_combination_at_every_checkpoint(tmp_path):
    """Its losses, parameters, optimizer state, step and data position equal those of a run without changes."""
    straight = run(tmp_path / "straight", ALL_COMBINATIONS[0], STEPS)
    for leg, combination in enumerate(LEGS, 1):
        flipped = run(tmp_path / "flipped", combination, leg * LEG)
        assert_equal(flipped, straight, leg * LEG)
        assert said(flipped, leg * LEG) == said(straight, leg * LEG), combination
