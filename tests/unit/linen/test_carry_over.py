"""A run of a team's own Linen block continues as a run of the NNX block that replaces it, without losing a step."""

from pathlib import Path

from compiler import exact
from run_cases import RUN, SETTINGS, arrays_of, killed_at, rows_of, train

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
# Without clipping: the global norm is summed in the order of parameter names, which change here.
KEYS = SETTINGS | {
    "learning_rate_schedule_steps": 20,
    "eval_interval": -1,
    "dropout_rate": 0.0,
    "gradient_clipping_threshold": 0,
}


def losses_of(run):
    return [row["loss"] for row in rows_of(run)]


@exact()
def test_parameters_optimizer_and_place_in_the_data_are_carried_over(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(GUIDES))
    from team_block import NNXBlock

    whole, keys = tmp_path / "whole" / RUN, KEYS | {"steps": 20}
    (tmp_path / "whole").mkdir()
    code, output = train(tmp_path / "whole", combination="linen", **keys | {"decoder_block": "team_block:LinenBlock"})
    assert code == 0, output
    half = killed_at(10, whole, tmp_path / "half")
    keys |= {"decoder_block": "team_block:NNXBlock", "load_full_state_path": half}
    for reset in (False, True):
        code, output = train(tmp_path, f"run_name={reset}", combination="nnx", **keys | {"reset_optimizer": reset})
        assert code == 0, output
        assert f"starting from {half}/checkpoints/10: 10 updates, " in output
    carried, fresh = (tmp_path / "runs" / name for name in ("False", "True"))
    assert losses_of(carried) == losses_of(whole)[10:]
    assert losses_of(fresh)[0] == losses_of(whole)[10]  # the same parameters and the same batch
    assert losses_of(fresh)[5] != losses_of(whole)[15]

    found, expected = (arrays_of(run / "checkpoints/20") for run in (carried, whole))
    assert len(found) == len(expected) > 30
    for name, array in expected.items():
        for ours, theirs in NNXBlock.PARAMETER_NAMES.items():
            name = name.replace(theirs, ours)
        assert array.tobytes() == found[name].tobytes(), name
