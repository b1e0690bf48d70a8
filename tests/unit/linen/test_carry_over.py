"""A run of a team's Linen block resumes as a run of the NNX block that replaces it, without losing a step."""

from pathlib import Path

import jax
import numpy as np
from compiler import unoptimized
from run_cases import RUN, SETTINGS, arrays_of, killed_at, rows_of, train
from support import pinned

from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.ops.paths import by_name
from trainer.training.build import build
from trainer.training.start import start

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
# No clipping: the global norm is summed in the order of parameter names, which change here.
KEYS = SETTINGS | {
    "learning_rate_schedule_steps": 20,
    "eval_interval": -1,
    "dropout_rate": 0.0,
    "gradient_clipping_threshold": 0,
    "opt_type": "lion",  # compiles in half of AdamW's time
}


def losses_of(run):
    return [row["loss"] for row in rows_of(run)]


@unoptimized()
def test_parameters_optimizer_and_place_in_the_data_are_carried_over(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GUIDES))
    from team_block import NNXBlock

    whole, keys = tmp_path / "whole" / RUN, KEYS | {"steps": 20}
    (tmp_path / "whole").mkdir()
    code, output = train(tmp_path / "whole", combination="linen", **keys | {"decoder_block": "team_block:LinenBlock"})
    assert code == 0, output
    half = killed_at(10, whole, tmp_path / "half")
    keys |= {"decoder_block": "team_block:NNXBlock", "load_full_state_path": half}
    code, output = train(tmp_path, combination="nnx", **keys)
    assert code == 0, output
    assert f"starting from {half}/checkpoints/10: 10 updates, " in output
    carried = tmp_path / RUN
    assert losses_of(carried) == losses_of(whole)[10:]

    def renamed(name):
        for ours, theirs in NNXBlock.PARAMETER_NAMES.items():
            name = name.replace(theirs, ours)
        return name

    found, expected = (arrays_of(run / "checkpoints/20") for run in (carried, whole))
    assert len(found) == len(expected) > 25
    for name, array in expected.items():
        assert array.tobytes() == found[renamed(name)].tobytes(), name

    words = (f"{key}={value}" for key, value in (keys | pinned("nnx") | {"reset_optimizer": True}).items())
    run = build(load(["base.yml", *words]).config, jax.devices()[:1])
    begun = start(run, open_dataset(run.config, print), None, print, schedule_given=True)
    assert (begun.updates, begun.position["row"]) == (10, 10 * run.rows)
    fresh = run.codec.unpack(begun.state)
    before = {renamed(name): array for name, array in arrays_of(half / "checkpoints/10").items()}
    for name, array in by_name(fresh.params).items():
        assert before[f"params/{name}"].tobytes() == np.asarray(array).tobytes(), name
    assert not any(np.any(np.asarray(array)) for array in jax.tree.leaves(fresh.opt_state) if array.ndim)
