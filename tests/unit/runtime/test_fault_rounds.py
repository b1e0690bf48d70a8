"""scripts/fault_rounds.py without processes; integration/test_interrupted.py runs a round."""

import pkgutil
import sys

import numpy as np
import pytest
from run_cases import fault_rounds

# Like a run of two processes: process 0 alone deletes checkpoints, and no data are prepared.
COMMON = {"step": 40, "batch": 40, "evaluation": 4, **dict.fromkeys(("save", "sidecar", "checksums", "commit"), 8)}
COMMON |= {"retention": 8}
COUNTS = [COMMON | {"row of metrics": 60, "deletion": 6}, COMMON]


def drawn(seed):
    run = fault_rounds.Undisturbed(fault_rounds.Outcome([], {}, set()), 20.0, COUNTS)
    return fault_rounds.drawn(seed, [(2, 2), (2, 4)], list(fault_rounds.FAULTS), lambda count, then: run)


def test_a_round_is_determined_by_its_seed_and_strikes_where_the_moment_comes():
    rounds = [drawn(seed) for seed in range(300)]
    assert rounds == [drawn(seed) for seed in range(300)]
    for *first, fault in (one.faults for one in rounds):
        moment, counts = fault["moment"], COUNTS[fault["process"]]
        assert moment in fault_rounds.FAULTS[fault["kind"]][0]
        if moment in fault_rounds.RESTORING:
            assert [one["kind"] for one in first] == ["kill"]
        elif moment != fault_rounds.ANY_TIME:
            assert 1 <= fault["call"] <= counts[moment]
    moments = {one.faults[-1]["moment"] for one in rounds}
    assert moments == {*COUNTS[0], *fault_rounds.RESTORING, fault_rounds.ANY_TIME}


@pytest.mark.parametrize("function", fault_rounds.MOMENTS.values())
def test_the_function_of_a_moment_exists(function):
    assert callable(pkgutil.resolve_name(function))


def test_results_are_of_one_command_and_equal_rounds_are_not_run_again(monkeypatch, tmp_path, capsys):
    ran = []

    def rounds(words, seeds, folder, processes, kinds, say, module, moments, volume):
        ran.append(list(seeds))
        for seed in seeds:
            say(f"seed {seed}: a kill, 3 s: {'FAILED' if seed == 1 else 'equal in every bit'}")
        return 0

    monkeypatch.setattr(fault_rounds, "rounds", rounds)
    command = ["fault_rounds.py", "--rounds", "3", "--results", str(tmp_path / "results"), "steps=3"]
    monkeypatch.setattr(sys, "argv", command)
    fault_rounds.main()
    fault_rounds.main()
    assert ran == [[0, 1, 2], [1]]
    monkeypatch.setattr(sys, "argv", [*command, "steps=4"])
    with pytest.raises(SystemExit):
        fault_rounds.main()
    assert "belongs to another command: trainer.train 1 kill,term" in capsys.readouterr().err


def test_another_number_of_processes_must_train_on_the_same_rows():
    rows, arrays = [{"step": 0, "loss": 4.0}], {"kernel": np.float32([0.5, 8.0])}
    left = fault_rounds.Outcome(rows, arrays, {"2 0 17"})
    right = left._replace(rows=[{"step": 0, "loss": 4.00001}], arrays={"kernel": np.float32([0.5, 8.00002])})
    assert fault_rounds.distances(left, right) == pytest.approx((2.5e-6, 2.5e-6), rel=0.1)
    for other in ({"samples": {"2 0 18"}}, {"rows": [{"step": 1, "loss": 4.0}]}, {"arrays": {}}):
        with pytest.raises(AssertionError):
            fault_rounds.distances(left, right._replace(**other))
    assert len(fault_rounds.differences(left, right._replace(samples=set()))) == 3
