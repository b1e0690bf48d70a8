"""Every row of every table of keys without effect has a case: settings that change the row's result."""

import pytest

from trainer.config.capabilities.all_keys import INERT, INERT_HERE
from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.effects import no_effect_of, without_effect
from trainer.config.keys import Config
from trainer.config.load import load

DEFAULTS = load(["base.yml"]).config

MOE = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
MLA = {"decoder_block": "deepseek", "attention_type": "mla"}
MMAP = {"dataset_type": "grain", "grain_file_type": "mmap"}
RL = {"use_grpo": True, "reward_functions": ["m:f"]}
STORED = {"checkpoint_is_quantized": True, "quantization": "int8"}
SPLIT = {"ici_context_parallelism": 2}
SYNTHETIC = {"dataset_type": "synthetic"}
NO_MASKS = {"weight_sparsity_start_step": 10, "steps": 5}
CUSTOM = {"remat_policy": "custom"}
OFF = {"enable_checkpointing": False}

# Settings that change a row's result, by the row's reason.
CASES = {
    "supervise=false": {"supervise": True},
    "remat_policy is not custom": CUSTOM,
    "num_experts=1": MOE,
    "every layer has experts, whose width is base_moe_mlp_dim": MOE,
    "routed_bias=false": {"routed_bias": True},
    "there are no groups": {"n_routing_groups": 2},
    "attention_type is not mla": MLA,
    "attention_type=mla reads qk_nope_head_dim, qk_rope_head_dim and v_head_dim": MLA,
    "it needs attention_type=mla and rope_type=yarn": MLA | {"rope_type": "yarn"},
    "attention_type=mla always rotates adjacent pairs": MLA,
    "sparse_matmul=true drops no token": {"sparse_matmul": False},
    "this family has only one way to weight a token's experts": MOE,
    "every layer of this family has experts, whose tensors are moe_mlp*": MOE,
    "with expert parallelism, the backward pass computes these tensors again": MOE | {"ici_expert_parallelism": 2},
    "only expert parallelism with sparse_matmul=true has buffers": MOE,
    "mlp_activations has two entries, whose projections are mlpwi_0 and mlpwi_1": CUSTOM,
    "mlp_activations has one entry, whose projection is mlpwi": CUSTOM | {"mlp_activations": ["gelu"]},
    "the backward pass does not read it, so it is neither saved nor recomputed": CUSTOM | {"mlpwo": "device"},
    "no layer has a window": {"attention_type": "local_sliding"},
    "this family has no recurrent layers": {"decoder_block": "qwen3_5"},
    "inhomogeneous_layer_cycle_interval=1": {"decoder_block": "qwen3_5"},
    "attention_type=mla does not read it": MLA,
    "use_qk_clip=false": {"use_qk_clip": True},
    "skip_step_on_spikes=false": {"skip_step_on_spikes": True},
    "enable_diloco=false": {"enable_diloco": True},
    "enable_streaming_diloco=false": {"enable_streaming_diloco": True},
    "only streaming DiLoCo with more than two fragments divides the layers": {
        "enable_streaming_diloco": True,
        "num_diloco_fragments": 3,
    },
    "temperature_tuning=false": {"temperature_tuning": True},
    "rope_type is not default": {"rope_type": "linear"},
    "rope_type=default": {"rope_type": "yarn"},
    "rope_type is not llama3.1": {"rope_type": "llama3.1"},
    "rope_type is not yarn": {"rope_type": "yarn"},
    "rope_type is not longrope or yarn": {"rope_type": "yarn"},
    "rope_type is not longrope": {"rope_type": "longrope"},
    "lr_schedule_type is not wsd": {"lr_schedule_type": "wsd"},
    "lr_schedule_type=constant stays at the peak": {"lr_schedule_type": "constant"},
    **{f"opt_type={name} does not read it": {"opt_type": "sgd" if name == "adamw" else name} for name in TRAITS},
    "weight_dtype=float32 loses no updates": {"weight_dtype": "bfloat16"},
    "enable_dropout=false": {"enable_dropout": False},
    "logits_via_embedding=false": {"logits_via_embedding": True},
    "mtp_num_layers=0": {"mtp_num_layers": 1},
    "keep_best_checkpoints=0": {"keep_best_checkpoints": 1},
    "eval_tasks is empty": {"eval_tasks": ["text"]},
    "eval_interval disables evaluation": {"eval_interval": -1, "keep_best_checkpoints": 1},
    "enable_checkpointing=false": OFF,
    "no state is loaded: enable_checkpointing=false and load_full_state_path is empty": OFF,
    "max_num_checkpoints_to_keep=none keeps all": {"max_num_checkpoints_to_keep": None},
    "profiler is empty": {"profiler": "xplane"},
    "dump_hlo=false": {"dump_hlo": True},
    "the strategy has no top k": {"decode_sampling_strategy": "topk"},
    "the strategy has no nucleus": {"decode_sampling_strategy": "nucleus"},
    "decode_sampling_strategy=greedy": {"decode_sampling_strategy": "greedy"},
    "use_chunked_prefill=false": {"use_chunked_prefill": True},
    "enable_prefix_caching=false": {"enable_prefix_caching": True},
    "quantize_kvcache=false": {"quantize_kvcache": True},
    "latents have no heads": MLA,
    "prompt is empty": {"prompt": ""},
    "dataset_type=synthetic has no tokenizer": SYNTHETIC,
    "use_grpo=false and distill_rollouts=false": RL,
    "use_grpo=false": RL,
    "distill_rollouts=false": {"distill_rollouts": True},
    "use_grpo=false and eval_tasks is empty": RL,
    "rollouts are packed": RL,
    "a run has num_batches x rl_num_iterations updates": RL | {"num_batches": 2},
    "each round has its own prompts": RL,
    "prompts are held in memory": RL,
    **{f"dataset_type is not {kind}": {"dataset_type": kind} for kind in ("tfds", "grain", "hf")},
    "dataset_type is neither tfds nor hf": {"dataset_type": "hf"},
    "dataset_type has its own files": {"dataset_type": "hf"},
    "grain_file_type=text has no columns": {"dataset_type": "grain", "grain_file_type": "text"},
    "grain_file_type is neither mmap nor mmap_npy": MMAP,
    "mmap files contain token ids, which are cut into rows unchanged": MMAP,
    "grain_file_type is not mmap_npy": MMAP | {"grain_file_type": "mmap_npy"},
    "reset_attention_mask=false and eod_mask_loss=false": {"reset_attention_mask": False, "eod_mask_loss": False},
    "reset_attention_mask=false": {"reset_attention_mask": False},
    "mmap_npy_split divides the documents": MMAP | {"grain_file_type": "mmap_npy", "mmap_npy_split": "9,1"},
    "mmap files contain token ids, and without a tokenizer_path there is no sample": MMAP,
    "use_sft=false": {"use_sft": True},
    "formatting_func_path is empty": {"formatting_func_path": "m:f"},
    "use_sft=false and use_chat_template=false": {"use_chat_template": True},
    "the chat template writes the special tokens": {"use_sft": True},
    "use_distill=false": {"use_distill": True},
    "teacher_logits_path replaces the teacher": {"teacher_logits_path": "a"},
    "save_teacher_logits is empty": {"save_teacher_logits": "a"},
    "only distill_loss=jensen_shannon has a weight": {"distill_loss": "jensen_shannon"},
    "distill_alpha_schedule=constant": {"distill_alpha_schedule": "linear"},
    "distill_temperature_schedule=constant": {"distill_temperature_schedule": "linear"},
    "use_dpo=false": {"use_dpo": True},
    "dpo_algo=orpo has no reference model": {"dpo_algo": "orpo"},
    "dpo_algo=dpo has no odds ratio": {"dpo_algo": "orpo"},
    "rewards are computed from answers only": {"use_dpo": True},
    "dataset_type has its own held-out rows": {"dataset_type": "hf"},
    "no data files are named by URL": {"dataset_type": "grain", "grain_train_files": "gs://a"},
    "nothing is prepared": {"prepared_path": "x"},
    "dataset_type=synthetic and prepared_path use no cache": {"prepared_path": "x"},
    "evaluation has its own documents": {"dataset_type": "grain", "grain_eval_files": "a"},
    "there is one column": {"use_sft": True, "train_data_columns": ["a", "b"]},
    "dataset_type=synthetic has no documents": SYNTHETIC,
    "dataset_type=synthetic has no files to shuffle": SYNTHETIC,
    "enable_data_shuffling=false": {"enable_data_shuffling": False},
    "data_pipeline=prepared": {"data_pipeline": "streaming"},
    "data_pipeline=prepared, or enable_data_shuffling=false": {"data_pipeline": "streaming"},
    "packing=false": {"packing": False},
    "grain_packing_type=concat_then_split": {"grain_packing_type": "first_fit"},
    "nothing is quantized": {"quantization": "int8"},
    "only stored weights are quantized": STORED,
    "checkpoint_is_quantized=false": STORED,
    "quantize_logits_proj=false": {"quantize_logits_proj": True},
    "there is one stage: ici_pipeline_parallelism and dcn_pipeline_parallelism are 1": {"ici_pipeline_parallelism": 2},
    "num_layers_per_pipeline_stage=1": {"num_layers_per_pipeline_stage": 2},
    "remat_policy=none": {"remat_policy": "full"},
    "the mesh axes context and context_usp_ulysses have one device": SPLIT,
    "context_parallel_strategy=ulysses gives each device whole rows": {"context_parallel_strategy": "ulysses"},
    "it applies only to the mesh axis context, which has one device": SPLIT,
    "context_parallel_load_balance=false": {"context_parallel_load_balance": False},
    "no weights are masked without weight_sparsity_n": {"weight_sparsity_n": 2},
    "steps is less than weight_sparsity_start_step, so no masks are made": NO_MASKS,
    "enable_lora=false": {"enable_lora": True},
    "nothing is quantized without lora_weight_qtype": {"lora_weight_qtype": "int8"},
    "the checkpoint is quantized already": STORED,
}
# Rows that need known devices.
CASES |= {
    "the attention op is not splash here": {"attention": "splash"},
    "with sa_use_fused_bwd_kernel=true the dkv kernel computes the gradient of queries": {
        "attention": "splash",
        "sa_use_fused_bwd_kernel": True,
    },
    "no row is split over devices here": SPLIT,
    "no weight of a stage is sharded over fsdp here": {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 1},
}
ALWAYS = [row for row in INERT if row.keys == ("override_model_config",)]
COEFFICIENTS = (
    *(key for traits in TRAITS.values() for key in traits.reads if key.endswith("_weight_decay")),
    *(traits.momentum for traits in TRAITS.values() if traits.momentum),
)


def changed(**settings):
    return Config({**DEFAULTS, **settings})


def is_of_optimizer(row):
    return list(row.keys) in (["adamw_mask"], ["mu_dtype"])


def test_every_row_says_something_else_in_its_case():
    rows = [row for row in (*INERT, *INERT_HERE) if row not in ALWAYS and not is_of_optimizer(row)]
    assert not [(row.keys, row.reason) for row in rows if row.when(DEFAULTS) == row.when(changed(**CASES[row.reason]))]
    assert CASES.keys() == {row.reason for row in rows}


@pytest.mark.parametrize(
    ("key", "settings", "inert"),
    [
        ("steps", RL, False),
        ("use_sequential_layers", {"enable_streaming_diloco": True, "num_diloco_fragments": 2}, True),
        ("use_sequential_layers", {"enable_streaming_diloco": True, "num_diloco_fragments": 3}, False),
        ("reset_optimizer", OFF | {"load_full_state_path": "runs/one"}, False),
        ("checkpoint_keep_period", {"max_num_checkpoints_to_keep": 3}, False),
        ("reward_num_workers", {}, True),
        ("reward_num_workers", RL, False),
        ("reward_num_workers", {"eval_tasks": ["text"]}, False),
        ("keep_best_checkpoints", {"keep_best_checkpoints": 1, "eval_interval": 5}, False),
        ("mscale", MLA, True),
        ("mscale", {"rope_type": "yarn"}, True),
    ],
)
def test_each_condition_of_a_row_counts(key, settings, inert):
    """The table above has one case for each row, which changes all of the row's conditions together. These cases meet
    single conditions."""
    assert (no_effect_of(changed(**{"max_num_checkpoints_to_keep": 2} | settings), key) is not None) == inert


def test_a_yml_may_repeat_a_value_that_follows_from_others():
    """A run's config.yml contains the derived value in place of 0 or an empty text."""
    for rows, lines in ((6, 0), (5, 1)):
        settings = {"per_device_batch_size": 2, "gradient_accumulation_steps": 3, "eval_per_device_batch_size": rows}
        config = changed(**settings, eval_interval=-1)
        assert len(without_effect(config, {"eval_per_device_batch_size": "config.yml:1"})) == lines


def test_a_decay_or_momentum_of_zero_is_said_of_each_optimizer_that_has_it():
    for row in filter(is_of_optimizer, INERT):
        (name,) = [name for name in TRAITS if row.when(changed(opt_type=name, **dict.fromkeys(COEFFICIENTS, 0.0)))]
        assert not row.when(changed(opt_type=name, **dict.fromkeys(COEFFICIENTS, 0.1)))
        assert all(key.removesuffix("=0") in TRAITS[name].reads for key in row.reason.split(" and "))
