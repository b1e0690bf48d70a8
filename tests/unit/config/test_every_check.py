"""Every row of every table of checks has a case: settings that the row refuses. No row refuses the defaults."""

from collections import defaultdict

import pytest

from trainer.config.capabilities.all_keys import paths_of
from trainer.config.capabilities.quantization_keys import METHODS
from trainer.config.check import CHECKS
from trainer.config.derived import DCN, ICI, UNUSED_AXES
from trainer.config.family import MULTIPLIERS, RECURRENT
from trainer.config.flags import FLAGS
from trainer.config.key_rows import Place
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.config.rules import merge_rules

DEFAULTS = load(["base.yml"]).config

ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2}
STREAMING = ISLANDS | {"enable_streaming_diloco": True}
MOE = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
DEEPSEEK = MOE | {"decoder_block": "deepseek", "shared_experts": 1}
PHI = {"decoder_block": "phi3"}
MLA = {"decoder_block": "deepseek", "attention_type": "mla"}
MMAP = {"dataset_type": "grain", "grain_file_type": "mmap"}
STAGE_SIZES = "ici_pipeline_parallelism dcn_pipeline_parallelism"
STAGES = {"ici_pipeline_parallelism": 2}
SPLIT = {"ici_context_parallelism": 2}
REORDERED = SPLIT | {"context_parallel_strategy": "ring"}
TAUGHT = {"use_distill": True}
RL = {"use_grpo": True, "reward_functions": ["m:f"]}
ROUNDS = RL | {"rl_num_iterations": 2}
OWN_TEXTS = {"use_distill": True, "distill_rollouts": True, "distill_alpha": 1.0}
SAMPLED = {"distill_loss": "sampled_reverse_kl"}
LORA = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0}
INVARIANT = {"batch_invariant": True}
DROPOUT = {"enable_dropout": True, "dropout_rate": 0.1}
DROPS = MOE | {"sparse_matmul": False, "capacity_factor": 1.0}
STORED = {"checkpoint_is_quantized": True, "quantization": "int8"}
ROUNDING = {"quantization": "int8", "bwd_stochastic_rounding": "uniform"}


def rules(*changed):
    return {"logical_axis_rules": merge_rules(DEFAULTS.logical_axis_rules, changed)}


# For each group of keys, the settings that its rows refuse, one for each row, in the order of the rows.
CASES = {
    **({" ".join(FLAGS): [dict(zip(FLAGS, (False, False, True), strict=True))]} if FLAGS else {}),
    "max_num_checkpoints_to_keep": [{"max_num_checkpoints_to_keep": 0}],
    "muon_consistent_rms": [{"muon_consistent_rms": 0.0}],
    "opt_type adam_eps": [{"opt_type": "muon", "adam_eps": 0.0}],
    "keep_best_metric eval_tasks": [{"keep_best_checkpoints": 1, "keep_best_metric": "max:questions/accuracy"}],
    "keep_best_checkpoints keep_best_metric checkpoint_period eval_interval eval_tasks_interval": [
        {"keep_best_checkpoints": 1, "checkpoint_period": 4, "eval_interval": 6}
    ],
    "load_parameters_path load_full_state_path": [{"load_parameters_path": "a", "load_full_state_path": "b"}],
    "run_name": [{"run_name": "a/b"}],
    "base_output_directory": [{"base_output_directory": it} for it in ("", "s3://b/x", "a\0")],
    "load_parameters_path": [{"load_parameters_path": it} for it in ("s3://b/x", "a\0")],
    "load_full_state_path": [{"load_full_state_path": it} for it in ("s3://b/x", "a\0")],
    "metrics_file": [{"metrics_file": it} for it in ("gs://b/x", "a\0")],
    "coordinator_address num_processes process_id": [{"process_id": 0}],
    "global_parameter_scale": [{"global_parameter_scale": 3}],
    "base_num_query_heads base_num_kv_heads": [
        {"base_num_query_heads": 4, "base_num_kv_heads": 3},
        MLA | {"base_num_query_heads": 4, "base_num_kv_heads": 2},
    ],
    "head_dim": [{"head_dim": 7}],
    "custom_device_tensors custom_offload_tensors": [{"custom_device_tensors": ["a"], "custom_offload_tensors": ["a"]}],
    "rope_min_timescale rope_max_timescale": [{"rope_min_timescale": 5, "rope_max_timescale": 5}],
    "rope_low_freq_factor rope_high_freq_factor": [
        {"rope_type": "llama3.1", "rope_low_freq_factor": 4.5, "rope_high_freq_factor": 4.0}
    ],
    "beta_slow beta_fast": [{"rope_type": "yarn", "beta_slow": 33.0, "beta_fast": 32.0}],
    "use_qk_clip use_qk_norm": [{"use_qk_clip": True, "use_qk_norm": True}],
    "use_qk_clip attn_logits_soft_cap": [{"use_qk_clip": True, "attn_logits_soft_cap": 30.0}],
    "mlp_activations": [{"mlp_activations": ["silly", "linear"]}],
    "trainable_position_size max_target_length": [{"trainable_position_size": 8, "max_target_length": 16}],
    "decoder_block fused_qkv": [{"fused_qkv": True}],
    "warmup_steps_fraction wsd_decay_steps_fraction": [
        {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.6, "wsd_decay_steps_fraction": 0.5}
    ],
    "steps learning_rate_schedule_steps": [{"steps": -1, "learning_rate_schedule_steps": -1}],
    "profile_periodically_period profiler_steps": [
        {"profiler": "xplane", "profile_periodically_period": 2, "profiler_steps": 3}
    ],
    "profiler skip_first_n_steps_for_profiler steps": [
        {"profiler": "xplane", "skip_first_n_steps_for_profiler": 5, "steps": 5}
    ],
    **{key: [{key: ["("]}] for key in ("adamw_mask", "trainable_parameters_mask", "unquantized_modules")},
    "learning_rate_groups": [{"learning_rate_groups": ["a"]}],
    "logical_axis_rules": [
        rules(["embed", ["tensor"]], ["mlp", ["tensor"]]),
        ISLANDS | rules(["mlp", ["diloco"]]),
        SPLIT | {"ici_tensor_parallelism": 2} | rules(["activation_kv_heads", []]),
    ],
    "compile_topology": [{"compile_topology": "v9-8"}],
    "compile_topology compile_topology_num_slices": [{"compile_topology": "cpu-8", "compile_topology_num_slices": 2}],
    "compile_topology compiled_trainstep_file": [{"compile_topology": "h100-8", "compiled_trainstep_file": "step"}],
    "decoder_block attention_type sliding_window_pattern sliding_window_size": [
        {"attention_type": "local_sliding", "sliding_window_size": 0}
    ],
    "rope_min_timescale local_rope_max_timescale": [{"rope_min_timescale": 5, "local_rope_max_timescale": 5}],
    "decoder_block attention_bias": [{"attention_bias": True}],
    "decoder_block sliding_window_pattern": [{"sliding_window_pattern": 2}],
    "decoder_block mlp_activations_limit": [{"mlp_activations_limit": 7}],
    "decoder_block partial_rotary_factor": [{"partial_rotary_factor": 0.5}],
    "head_dim partial_rotary_factor": [PHI | {"partial_rotary_factor": 0.1}],
    **{f"decoder_block rope_{name}_factor": [{f"rope_{name}_factor": [1.0]}] for name in ("short", "long")},
    "rope_short_factor rope_long_factor": [PHI | {"rope_type": "longrope", "rope_short_factor": [1.0]}],
    "rope_factor original_max_position_embeddings": [PHI | {"rope_type": "longrope", "rope_factor": 4.0}],
    "decoder_block nope_layer_interval": [{"nope_layer_interval": 2}],
    "decoder_block chunk_attn_window_size": [{"chunk_attn_window_size": 4}],
    **{f"decoder_block {key}": [{key: 7}] for key in RECURRENT},
    "gdn_num_value_heads gdn_num_key_heads": [
        {"decoder_block": "qwen3_5", "inhomogeneous_layer_cycle_interval": 2, "gdn_num_value_heads": 7}
    ],
    "decoder_block temperature_tuning": [{"temperature_tuning": True}],
    "decoder_block temperature_tuning_scale": [{"temperature_tuning_scale": 0.2}],
    "decoder_block temperature_tuning_floor_scale": [{"temperature_tuning_floor_scale": 4}],
    "decoder_block use_post_attn_norm": [{"use_post_attn_norm": True}],
    "decoder_block use_post_ffw_norm": [{"use_post_ffw_norm": True}],
    **{f"decoder_block {key}": [{key: 2.0}] for key in MULTIPLIERS},
    "first_num_dense_layers base_num_decoder_layers": [
        DEEPSEEK | {"first_num_dense_layers": 2, "base_num_decoder_layers": 2}
    ],
    "interleave_moe_layer_step base_num_decoder_layers": [
        DEEPSEEK | {"interleave_moe_layer_step": 2, "base_num_decoder_layers": 3}
    ],
    "decoder_block shared_experts": [DEEPSEEK | {"shared_experts": 0}],
    "n_routing_groups topk_routing_group num_experts num_experts_per_tok": [DEEPSEEK | {"n_routing_groups": 3}],
    "decoder_block num_experts": [{"num_experts": 4}],
    "decoder_block routed_score_func": [MOE | {"routed_score_func": "sigmoid"}],
    "decoder_block routed_bias routed_score_func": [MOE | {"routed_bias": True}],
    "num_experts_per_tok num_experts": [MOE | {"num_experts_per_tok": 5}],
    "decoder_block base_moe_mlp_dim": [MOE | {"base_moe_mlp_dim": -1}],
    "decoder_block mlp_activations": [MOE | {"mlp_activations": ["silu"]}],
    "decoder_block attention_type": [{"attention_type": "mla"}],
    "qk_rope_head_dim": [MLA | {"qk_rope_head_dim": 7}],
    "attention_type use_qk_norm": [MLA | {"use_qk_norm": True}],
    "mtp_num_layers max_target_length": [{"mtp_num_layers": 16, "max_target_length": 16}],
    "mtp_eval_target_module mtp_num_layers": [{"mtp_eval_target_module": 1}],
    "enable_diloco ici_diloco_parallelism dcn_diloco_parallelism": [{"ici_diloco_parallelism": 2}],
    "enable_diloco ema_decay": [ISLANDS | {"ema_decay": 0.9}],
    "enable_diloco enable_streaming_diloco": [{"enable_streaming_diloco": True}],
    "enable_streaming_diloco num_diloco_fragments diloco_sync_period base_num_decoder_layers": [
        STREAMING | {"num_diloco_fragments": 50, "base_num_decoder_layers": 2}
    ],
    "enable_streaming_diloco num_diloco_fragments diloco_sync_period num_communication_overlapping_steps": [
        STREAMING | {"num_communication_overlapping_steps": 1000}
    ],
    "dataset_type data_pipeline": [{"dataset_type": "stdlib", "data_pipeline": "streaming"}],
    "prepared_path data_pipeline": [{"prepared_path": "x", "data_pipeline": "streaming", "dataset_type": "grain"}],
    "prepared_path use_grpo distill_rollouts": [{"prepared_path": "x", "use_grpo": True}],
    "drop_duplicates data_pipeline": [{"drop_duplicates": True, "data_pipeline": "streaming"}],
    "drop_duplicates use_grpo distill_rollouts": [{"drop_duplicates": True, "use_grpo": True}],
    "drop_duplicates": [MMAP | {"drop_duplicates": True}],
    "document_min_length document_max_length": [{"document_min_length": 2, "document_max_length": 1}],
    "document_filter": [{"document_filter": "no function"}, MMAP | {"document_filter": "a:b"}],
    "document_normalization": [MMAP | {"document_normalization": "NFC"}],
    "document_min_length": [MMAP | {"document_min_length": 1}],
    "document_max_length": [MMAP | {"document_max_length": 1}],
    "mmap_npy_split": [{"mmap_npy_split": "99"}],
    "grain_file_type packing": [MMAP | {"packing": False}],
    "grain_file_type data_pipeline": [MMAP | {"data_pipeline": "streaming"}],
    "batch_invariant grain_file_type reset_attention_mask": [MMAP | INVARIANT],
    "use_sft use_dpo use_grpo": [{"use_sft": True, "use_dpo": True}],
    "chat_template chat_template_path": [{"chat_template": "{{ x }}", "chat_template_path": "a"}],
    "chat_template": [{"chat_template": "a.jinja"}],
    "num_epoch": [{"num_epoch": 2, "dataset_type": "synthetic"}],
    "formatting_func_path": [{"formatting_func_path": "a b"}],
    "use_distill use_dpo use_grpo": [TAUGHT | {"use_dpo": True}],
    f"use_distill {STAGE_SIZES}": [TAUGHT | STAGES],
    "use_distill distill_alpha distill_alpha_schedule": [TAUGHT | {"distill_alpha": 0.0}],
    "use_distill teacher_logits_path teacher_path save_teacher_logits": [
        TAUGHT | {"teacher_logits_path": "a", "teacher_path": "b"}
    ],
    "use_distill save_teacher_logits supervise": [TAUGHT | {"save_teacher_logits": "a", "supervise": True}],
    "use_distill teacher_overrides": [TAUGHT | {"teacher_overrides": {"load_parameters_path": "a"}}],
    "use_distill distill_alpha_schedule distill_alpha_end": [TAUGHT | {"distill_alpha_schedule": "linear"}],
    "use_distill distill_temperature_schedule distill_temperature_end": [
        TAUGHT | {"distill_temperature_schedule": "cosine"}
    ],
    "teacher_path": [{"teacher_path": it} for it in ("s3://b/x", "a\0")],
    "distill_alpha_end": [{"distill_alpha_end": 1.5}],
    "distill_temperature_end": [{"distill_temperature_end": 0.0}],
    "dpo_max_prompt_length": [{"dpo_max_prompt_length": 0}],
    "use_dpo packing grain_packing_type": [{"use_dpo": True}],
    **{
        f"use_dpo {key}": [{"use_dpo": True, key: 1}]
        for key in ("mtp_num_layers", "z_loss_multiplier", "label_smoothing")
    },
    **{
        f"use_dpo dpo_algo use_grpo rl_grpo_beta {key}": [{"use_grpo": True, "rl_grpo_beta": 0.1, key: 1}]
        for key in ("routed_bias_update_rate", "weight_sparsity_n")
    },
    "dataset_type dataset_path": [{"dataset_type": "tfds"}],
    "dataset_type dataset_name": [{"dataset_type": "tfds"}],
    "dataset_type hf_path": [{"dataset_type": "hf"}],
    "dataset_type grain_train_files grain_train_mixture_config_path": [{"dataset_type": "grain"}],
    "train_data_columns use_sft use_dpo use_grpo": [{"train_data_columns": ["a", "b", "c"]}],
    "eval_data_columns use_sft use_dpo use_grpo": [{"eval_data_columns": []}],
    "tokenizer_type tokenizer_path": [{"tokenizer_type": "sentencepiece"}],
    "dataset_type tokenize_train_data tokenize_eval_data": [{"dataset_type": "hf", "tokenize_train_data": False}],
    "dataset_type vocab_size": [{"vocab_size": 256}],
    "dataset_type max_target_length": [{"max_target_length": 15}],
    "pipeline_fsdp_ag_once pipeline_fsdp_ag_per_repeat": [
        {"pipeline_fsdp_ag_once": True, "pipeline_fsdp_ag_per_repeat": True}
    ],
    f"{STAGE_SIZES} num_pipeline_microbatches pipeline_delay_activation_forwarding": [
        STAGES | {"num_pipeline_microbatches": 3}
    ],
    f"{STAGE_SIZES} logical_axis_rules": [STAGES | rules(["mlp", ["stage"]])],
    f"{STAGE_SIZES} enable_streaming_diloco": [STAGES | STREAMING],
    "max_target_length": [{"ici_context_parallelism": 3}],
    "base_num_query_heads context_parallel_strategy": [
        {"ici_context_parallelism": 3, "context_parallel_strategy": "ulysses", "base_num_query_heads": 4}
    ],
    "context_parallel_strategy ici_context_usp_ulysses_parallelism dcn_context_usp_ulysses_parallelism": [
        SPLIT | {"ici_context_usp_ulysses_parallelism": 2}
    ],
    "sparse_matmul capacity_factor": [DROPS | SPLIT],
    "decoder_block": [SPLIT | {"decoder_block": "qwen3_5"}, REORDERED | {"decoder_block": "m:f"}],
    "enable_dropout dropout_rate attention_dropout_rate": [REORDERED | DROPOUT],
    "bwd_stochastic_rounding": [REORDERED | ROUNDING],
    "mtp_eval_target_module": [REORDERED | {"mtp_eval_target_module": 1, "eval_interval": 5}],
    "decode_sampling_strategy decode_sampling_top_k": [
        {"decode_sampling_strategy": "topk", "decode_sampling_top_k": 0}
    ],
    "decode_sampling_strategy decode_sampling_nucleus_p": [
        {"decode_sampling_strategy": "nucleus", "decode_sampling_nucleus_p": 0.0}
    ],
    "use_grpo distill_rollouts decode_sampling_strategy decode_sampling_temperature": [
        RL | {"decode_sampling_strategy": "greedy"}
    ],
    "use_grpo reward_functions": [RL | {"reward_functions": []}],
    "use_grpo train_data_columns eval_data_columns": [RL | {"eval_data_columns": ["a", "completions"]}],
    "use_grpo distill_rollouts max_prefill_predict_length max_target_length": [
        RL | {"max_prefill_predict_length": 16, "max_target_length": 16}
    ],
    "use_grpo distill_rollouts steps rl_num_iterations": [ROUNDS | {"steps": 3}],
    "use_grpo distill_rollouts checkpoint_period rl_num_iterations": [ROUNDS | {"checkpoint_period": 3}],
    **{
        f"use_grpo distill_rollouts {key}": [RL | {key: 1}]
        for key in ("enable_diloco", "mtp_num_layers", "z_loss_multiplier", "label_smoothing", "quantize_kvcache")
    },
    "use_distill distill_loss distill_rollouts": [{"use_distill": True} | SAMPLED],
    "distill_rollouts save_teacher_logits teacher_logits_path": [OWN_TEXTS | {"save_teacher_logits": "a"}],
    "distill_rollouts use_sft": [OWN_TEXTS | {"use_sft": True}],
    "distill_rollouts distill_alpha distill_alpha_schedule distill_rollouts_share": [
        OWN_TEXTS | {"distill_alpha": 0.5}
    ],
    "distill_rollouts distill_loss distill_rollouts_share": [OWN_TEXTS | SAMPLED | {"distill_rollouts_share": 0.5}],
    "distill_rollouts distill_loss distill_temperature distill_temperature_schedule decode_sampling_temperature": [
        OWN_TEXTS | SAMPLED | {"distill_temperature": 2.0}
    ],
    **{key: [{key: "minimax"}] for key in METHODS},
    "checkpoint_is_quantized quantization weight_quantization_calibration_method": [{"quantization": "nf4"}],
    "checkpoint_is_quantized quantize_logits_proj logits_via_embedding": [
        STORED | {"quantize_logits_proj": True, "logits_via_embedding": True}
    ],
    "weight_block_size checkpoint_is_quantized quantization": [{"weight_block_size": [1]}],
    "weight_quantization_algorithm quantization weight_block_size weight_quantization_calibration_method": [
        {"weight_quantization_algorithm": "gptq", "quantization": "nf4"}
    ],
    "quantize_mtp mtp_num_layers": [{"quantize_mtp": True}],
    "quantization bwd_stochastic_rounding": [ROUNDING | {"quantization": "fp8"}],
    "quantization bwd_stochastic_rounding quantize_logits_proj": [ROUNDING | {"quantize_logits_proj": True}],
    "weight_sparsity_n weight_sparsity_m": [{"weight_sparsity_n": 2}],
    "enable_lora lora_rank lora_alpha": [LORA | {"lora_rank": 0}],
    "lora_module_path": [{"lora_module_path": "("}],
    "lora_tile_size lora_weight_qtype": [{"lora_weight_qtype": "nf4", "lora_tile_size": 3}],
    "lora_restore_path load_full_state_path": [LORA | {"lora_restore_path": "a", "load_full_state_path": "b"}],
    "enable_lora lora_weight_qtype quantization": [LORA | {"lora_weight_qtype": "int8", "quantization": "int8"}],
    **{
        f"enable_lora {key}": [LORA | {key: 1}]
        for key in ("weight_sparsity_n", "use_qk_clip", "routed_bias_update_rate")
    },
    "batch_invariant max_target_length": [INVARIANT | {"max_target_length": 192}],
    "batch_invariant attention": [INVARIANT | {"attention": "flash"}],
    "batch_invariant enable_dropout dropout_rate attention_dropout_rate": [INVARIANT | DROPOUT],
    "batch_invariant sparse_matmul capacity_factor": [INVARIANT | DROPS],
    "batch_invariant decoder_block": [INVARIANT | {"decoder_block": "m:f"}, INVARIANT | {"decoder_block": "qwen3_5"}],
    "batch_invariant prefill_chunk_size": [INVARIANT | {"prefill_chunk_size": 32}],
    "batch_invariant quantization": [INVARIANT | {"quantization": "int8"}],
    "batch_invariant quantize_kvcache": [INVARIANT | {"quantize_kvcache": True}],
    "batch_invariant weight_sparsity_m": [INVARIANT | {"weight_sparsity_m": 4}],
    "batch_invariant lora_weight_qtype": [INVARIANT | {"lora_weight_qtype": "int8"}],
    **{
        f"batch_invariant {keys[axis]}": [INVARIANT | {keys[axis]: 2}]
        for keys in (ICI, DCN)
        for axis in keys
        if axis not in ("diloco", "data", "fsdp")
    },
    **{keys[axis]: [{keys[axis]: 2}] for keys in (ICI, DCN) for axis in UNUSED_AXES},
    **{
        " ".join(keys[axis] for axis in keys if axis not in UNUSED_AXES): [{keys["data"]: -1, keys["fsdp"]: -1}]
        for keys in (ICI, DCN)
    },
}
# Paths: a URL that the key does not support, and a character that no file system allows.
KINDS = {"dataset": "tfds", "grain": "grain", "hf": "hf"}
for key in paths_of(Place.LOCAL, Place.DATA):
    kind = {"dataset_type": KINDS.get(key.partition("_")[0], "stdlib"), "use_sft": True} | TAUGHT
    scheme = "az" if key in paths_of(Place.DATA) else "s3"
    CASES[key] = [kind | {key: f"{scheme}://b/x"}, {key: "a\0"}]
CASES["grain_eval_files"].insert(0, {"dataset_type": "grain", "grain_eval_files": "a,1"})
for key in ("lora_restore_path", "compiled_trainstep_file", "compile_report_file", "dump_hlo_local_dir"):
    CASES[key] = [{key: "a\0"}]
for key in ("dataset_name", "eval_dataset_name", "hf_name", "hf_data_dir"):
    CASES[key] = [{key: "a\0"}]
CASES["hf_data_dir"].insert(0, {"dataset_type": "hf", "hf_data_dir": "gs://a"})

ROWS = defaultdict(list)
for row in CHECKS:
    if row[0]:  # once the flags are removed, their row has no keys
        ROWS[" ".join(row[0])].append(row[1])


def test_every_row_has_a_case_and_every_case_a_row():
    assert {keys: len(rows) for keys, rows in ROWS.items()} == {keys: len(cases) for keys, cases in CASES.items()}


def test_every_row_refuses_its_case_and_not_the_defaults():
    wrong = []
    for keys, cases in CASES.items():
        for row, case in zip(ROWS[keys], cases, strict=False):
            said = row(Config({**DEFAULTS, **case})), row(DEFAULTS)
            wrong += [(keys, case, *said)] * (not said[0] or said[1] is not None)
    assert not wrong


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ("lora_tile_size lora_weight_qtype", {"lora_weight_qtype": "int8", "lora_tile_size": 3}),
        ("lora_tile_size lora_weight_qtype", {"lora_weight_qtype": "nf4", "lora_tile_size": 4}),
        ("enable_lora lora_rank lora_alpha", {"lora_rank": 0}),
        ("lora_restore_path load_full_state_path", LORA | {"lora_restore_path": "a"}),
        ("lora_restore_path load_full_state_path", LORA | {"load_full_state_path": "b"}),
        ("enable_lora lora_weight_qtype quantization", LORA | {"quantization": "int8"}),
        ("enable_lora weight_sparsity_n", {"weight_sparsity_n": 1}),
        ("use_distill teacher_overrides", TAUGHT | {"teacher_overrides": {"dtype": "bfloat16"}}),
        (f"use_distill {STAGE_SIZES}", TAUGHT | STAGES | {"teacher_logits_path": "a"}),
        ("use_distill distill_alpha distill_alpha_schedule", {"distill_alpha": 0.0}),
        (
            "use_distill distill_alpha distill_alpha_schedule",
            TAUGHT | {"distill_alpha": 0.0, "distill_alpha_schedule": "linear", "distill_alpha_end": 1.0},
        ),
        ("distill_temperature_end", {"distill_temperature_end": 0.5}),
        ("use_grpo distill_rollouts steps rl_num_iterations", ROUNDS | {"steps": 3, "num_batches": 2}),
    ],
)
def test_a_part_of_a_case_is_allowed(keys, settings):
    (row,) = ROWS[keys]
    assert row(Config({**DEFAULTS, **settings})) is None
