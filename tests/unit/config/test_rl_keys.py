"""Keys of reinforcement learning: what is refused, and what makes rollouts and updates differ."""

import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.errors import UserError
from trainer.config.load import load

GRPO = {"use_grpo": True, "reward_functions": "[m:f]", "decode_sampling_temperature": 1, "enable_dropout": True}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
DROPS = EXPERTS | {"sparse_matmul": False, "capacity_factor": 1.5}
FIXED = {"act_quantization_calibration_method": "fixed,-1,1"}


def warned(**keys):
    """Returns the beginning of each warning that rollouts and updates differ."""
    lines = load(arguments(ALL_COMBINATIONS[0], **(GRPO | keys))).warnings
    return [line.split(":")[0] for line in lines if "differ from those of the rollouts" in line]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, []),
        (EXPERTS, []),
        (DROPS, ["sparse_matmul=false capacity_factor=1.5"]),
        (DROPS | {"capacity_factor": 2.0}, []),  # an expert has capacity for all tokens of a row
        (DROPS | {"capacity_factor": -1.0}, []),
        (DROPS | {"use_grpo": False}, []),
        ({"dropout_rate": 0.1}, ["enable_dropout=true dropout_rate=0.1 attention_dropout_rate=0.0"]),
        ({"attention_dropout_rate": 0.1}, ["enable_dropout=true dropout_rate=0.0 attention_dropout_rate=0.1"]),
        ({"dropout_rate": 0.1, "enable_dropout": False}, []),
        ({"quantization": "fp8_gpu"}, ['quantization="fp8_gpu"']),
        ({"quantization": "fp8_gpu"} | FIXED, []),
        ({"quantization": "fp8_gpu", "quantize_logits_proj": True} | FIXED, []),
        (
            {"quantization": "fp8_gpu", "quantize_logits_proj": True, "logits_proj_quant_calibration_method": "absmax"}
            | FIXED,
            ['quantization="fp8_gpu"'],
        ),
        ({"quantization": "fp8"}, []),
        (
            DROPS | {"dropout_rate": 0.1},
            [
                "sparse_matmul=false capacity_factor=1.5",
                "enable_dropout=true dropout_rate=0.1 attention_dropout_rate=0.0",
            ],
        ),
    ],
)
def test_settings_that_make_updates_another_function_than_rollouts_are_said(keys, said):
    assert warned(**keys) == said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decode_sampling_temperature": 0}, "completions must be sampled"),
        ({"train_data_columns": "[prompt,prompts]"}, "prompts is the name of another argument"),
        ({"reward_functions": "[m]"}, "not the path of a function"),
        ({"steps": 5, "rl_num_iterations": 2}, "which have 2 updates each; nearest: 4 or 6"),
        ({"checkpoint_period": 3, "num_batches": 2, "rl_num_iterations": 2}, "updates each; nearest: 2 or 4"),
    ],
)
def test_refused(keys, message):
    """Cases in addition to those of test_every_check.py, which has one for each row of the table."""
    with pytest.raises(UserError, match=message):
        warned(**keys)
