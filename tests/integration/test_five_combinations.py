"""The promise of the three flags: every combination has the same program."""

import functools

import jax
import pytest
from support import ALL_COMBINATIONS, arguments, lowered_gradients, lowered_update

from trainer.config.load import load
from trainer.training.build import build

DROPOUT = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}
SETTINGS = {
    "unrolled": {
        "scan_layers": False,
        "base_num_decoder_layers": 2,
        "remat_policy": "minimal",
        "gradient_clipping_threshold": 0.05,
        **DROPOUT,
    },
    "scan with remat, Muon, experts along 2 devices, context 2, fsdp 2": {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 32,
        "load_balance_loss_weight": 0.1,
        "scan_layers": True,
        "remat_policy": "full",
        "record_internal_nn_metrics": 1,
        "opt_type": "muon",
        "skip_step_on_spikes": True,
        "use_qk_clip": True,
        "ema_decay": 0.9,
        "parameter_metrics_period": 2,
        "learning_rate_groups": "[embedding=0.5]",
        "ici_fsdp_parallelism": 2,
        "ici_expert_parallelism": 2,
        "ici_context_parallelism": 2,
        "per_device_batch_size": 1,
    },
    "2 islands of fsdp 2 x tensor 2, Adafactor": {
        "enable_diloco": True,
        "ici_diloco_parallelism": 2,
        "diloco_sync_period": 6,
        "ici_fsdp_parallelism": 2,
        "ici_tensor_parallelism": 2,
        "per_device_batch_size": 1,
        "num_vocab_tiling": 2,
        "opt_type": "adafactor",
        "adafactor_min_dim_size_to_factor": 8,
        "enable_streaming_diloco": True,
        "num_diloco_fragments": 3,
        "num_communication_overlapping_steps": 1,
        "communication_overlapping_alpha": 0.5,
        "diloco_outer_grad_dtype": "int8",
        **DROPOUT,
    },
    "adapters over nf4, experts": {
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 32,
        "base_num_decoder_layers": 1,
        "enable_lora": True,
        "lora_rank": 2,
        "lora_alpha": 3.0,
        "lora_weight_qtype": "nf4",
        "trainable_parameters_mask": "[norm]",
        "ema_decay": 0.9,
    },
    "preferences": {
        "use_dpo": True,
        "dataset_type": "grain",
        "grain_train_files": "pairs.jsonl",
        **dict.fromkeys(("train_data_columns", "eval_data_columns"), "[chosen,rejected]"),
        "packing": False,
    },
    "separate head, blockwise attention, bfloat16, dropout, multi-token prediction": {
        **DROPOUT,
        "logits_via_embedding": False,
        "attention": "flash",
        "dtype": "bfloat16",
        "remat_policy": "minimal",
        "num_vocab_tiling": 4,
        "label_smoothing": 0.1,
        "z_loss_multiplier": 1e-3,
        "mtp_num_layers": 1,
        "final_logits_soft_cap": 20.0,
    },
}


# Outside of its gradients, an update depends on the combination by axes and layers, which Muon and QK-Clip read.
WHOLE = [name for name in SETTINGS if "Muon" in name or "islands" in name]


def made(combination, setting):
    overrides = SETTINGS[setting]
    devices = jax.devices()[: 8 if "ici_fsdp_parallelism" in overrides else 1]
    config = load(arguments(combination, learning_rate=1e-2, **overrides)).config
    return build(config, devices)


@functools.cache
def program_text(setting, combination):
    lowered = lowered_update if setting in WHOLE else lowered_gradients
    return lowered(made(combination, setting)).as_text()


def test_all_combinations_have_the_same_program():
    """One test for all combinations, so that every run of the suite compares all."""
    expected = program_text("unrolled", ALL_COMBINATIONS[0])
    assert "stablehlo.dot_general" in expected
    for combination in ALL_COMBINATIONS[1:]:
        assert program_text("unrolled", combination) == expected, combination


@pytest.mark.rest(
    covered_by="three more settings",
    cases=(
        "2 islands of fsdp 2 x tensor 2, Adafactor",
        "separate head, blockwise attention, bfloat16, dropout, multi-token prediction",
    ),
)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "unrolled"])
def test_the_update_is_the_same_program(setting, combination):
    """Over canonical trees, the programs have the same text and therefore the same bits. XLA compiles them once."""
    assert program_text(setting, combination) == program_text(setting, ALL_COMBINATIONS[0])
