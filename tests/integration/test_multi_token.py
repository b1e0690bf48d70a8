"""Multi-token prediction in a whole run: evaluated, sampled, saved, and resumed under another combination."""

import pytest
from run_cases import RUN, arrays_of, killed_at, rows_of, train
from support import ALL_COMBINATIONS

KEYS = {
    "steps": 6,
    "learning_rate_schedule_steps": 6,
    "checkpoint_period": 3,
    "eval_interval": 3,
    "eval_steps": 1,
    "mtp_num_layers": 2,
    "mtp_eval_target_module": 2,
    "attention_dropout_rate": 0.1,
    "base_num_decoder_layers": 1,
    "record_internal_nn_metrics": 1,
}


@pytest.mark.rest(covered_by="integration/test_diloco.py; evaluation and dropout in unit/training/test_multi_token.py")
def test_a_run_goes_on_under_another_combination(tmp_path):
    (tmp_path / "whole").mkdir()
    code, output = train(tmp_path / "whole", **KEYS)
    assert code == 0, output
    killed_at(3, tmp_path / "whole" / RUN, tmp_path / "parts")
    last = ALL_COMBINATIONS[-1]
    code, output = train(tmp_path / "parts", "run_name=run-0001", combination=last, **KEYS)
    assert code == 0, output
    whole, parts = (tmp_path / folder / RUN for folder in ("whole", "parts"))
    steps, evaluations = ([row for row in rows_of(parts) if (name in row)] for name in ("loss", "eval_loss"))
    assert [row["step"] for row in steps] == list(range(6))
    expected = [row for row in rows_of(whole) if "loss" in row]
    assert steps[3:] == expected[3:]
    assert all(row["loss"] > row["lm_loss"] and row["mtp_loss"] > 0 for row in steps)
    assert 0 <= evaluations[-1]["eval_mtp_acceptance_rate"] <= 1
    block = "mtp_block/mtp_layer_1/mtp_1_transformer_layer/output_mean"
    assert isinstance(steps[-1][block], float)
    left, right = (arrays_of(run / "checkpoints/6") for run in (whole, parts))
    assert left.keys() == right.keys()
    assert all(array.tobytes() == right[name].tobytes() for name, array in left.items())
    code, output = train(
        tmp_path / "parts", "run_name=run-0001", **KEYS | {"mtp_num_layers": 1, "mtp_eval_target_module": 0}
    )
    assert code == 2
    assert "mtp_num_layers: 2 -> 1" in output
