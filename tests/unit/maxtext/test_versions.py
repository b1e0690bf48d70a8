"""Commands and keys of MaxText 0.2.5, which has no flags, and of earlier versions."""

import pytest
import yaml
from config_cases import mistakes, their_base, write

from trainer import from_maxtext
from trainer.config.flags import COMBINATIONS, FLAGS, combination, flags_of
from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.config.schema import schema
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import GENERATE, TRAIN, convert
from trainer.maxtext.version import version_of

# The keys that base.yml of 0.2.5 adds to that of 0.2.4, with their values.
ADDED = {
    "use_m3_model": False,
    "standalone_checkpointer_per_step_interval": 0.0,
    "standalone_checkpointer_drop_page_cache_before_restore": False,
    "standalone_checkpointer_enable_restore_in_loop": True,
    "standalone_checkpointer_start_from_checkpoint": False,
    "checkpoint_storage_device_host_concurrent_gb": 8,
    "quantize_mtp": False,
    "quantize_router_proj": True,
    "quantize_logits_proj": False,
    "logits_proj_quant_calibration_method": "",
    "drhs_grad_quantization_calibration_method": None,
    "unquantized_modules": [],
    "weight_block_size": None,
    "csa_qk_head_chunk_size": 0,
    "mtp_reuse_input_embedding": False,
    "moe_log_max_load_ratio": False,
    "eval_ragged_buffer_factor": -1.0,
    "moe_dropless_fallback": "None",
    "retry_dropless_first_steps": 0,
    "first_phase_ragged_buffer_factor": 0.0,
    "log_required_ragged_buffer_factor": False,
    "warmup_programs_in_init": False,
    "log_step_diagnostics": False,
    "moe_use_megatron_seq_aux_loss": False,
    "router_topk_matmul_vjp": False,
    "moe_topk_before_ep_all_gather": False,
    "te_moe_block": False,
    "te_ep_overflow_check_every_n_steps": 20,
    "te_gmm_quantization": "",
    "moe_quantize_token_all_gather": False,
    "moe_quantize_combine_bwd_method": "",
    "moe_use_direct_token_gather": False,
    "moe_pin_sparse_core_all_gathers": False,
    "moe_pin_sparse_core_ep_all_gathers": False,
    "moe_pin_sparse_core_fsdp_all_gathers": False,
    "moe_pin_sparse_core_fsdp_all_gathers_fwd_only": False,
    "moe_fsdp_all_gather_sparse_core_id": 0,
    "moe_ep_all_gather_sparse_core_id": 1,
    "eval_wi_tile_fwd_batch_seq": 512,
    "eval_wi_tile_fwd_embed_dim": 1024,
    "eval_wi_tile_fwd_mlp_dim": 1024,
    "eval_wo_tile_fwd_batch_seq": 512,
    "eval_wo_tile_fwd_embed_dim": 1024,
    "eval_wo_tile_fwd_mlp_dim": 1024,
    "use_gmm_v2_heuristic_tiling": False,
    "return_routed_experts": False,
    "shard_embed_moe_on_fsdp": False,
    "defer_small_all_reduces": False,
    "use_lineage": False,
    "moe_x_sorted": "remat",
    "moe_routing_maps": "remat",
    "use_mla_absorbed_mqa": False,
    "use_csa_streamindex_kernel": False,
    "enable_mllog": False,
    "mllog_file": "",
    "use_stream_chunking": None,
    "mmap_eod_id": 0,
    "blend_cache_dir": "",
    "blend_index_dir": "",
    "reset_attention_mask": True,
    "eod_mask_loss": False,
    "packing_max_segments_per_sample": 25,
    "mmap_split_sentences": False,
    "mmap_npy_split": "",
    "managed_mldiagnostics_storage_path": "",
    "block_state_before_run_start": False,
    "warm_input_reshard_before_run_start": False,
    "train_shard_in_read": False,
    "train_interleave_cycle_length": -1,
    "muon_type": "optax_muon",
    "muon_include_routers": True,
    "muon_use_all_to_all": False,
    "goodput_job_name": "",
    "eval_sa_block_q": 512,
    "eval_sa_block_kv": 512,
    "eval_sa_block_kv_compute": 512,
    "eval_sa_q_layout": "HEAD_DIM_MINOR",
    "eval_sa_k_layout": "HEAD_DIM_MINOR",
    "eval_sa_v_layout": "HEAD_DIM_MINOR",
    "eval_local_sa_block_q": "None",
    "eval_local_sa_block_kv": "None",
    "eval_local_sa_block_kv_compute": "None",
    "eval_local_sa_q_layout": "None",
    "eval_local_sa_k_layout": "None",
    "eval_local_sa_v_layout": "None",
    "use_weight_converter": True,
    "rollout_tensor_parallelism": -1,
    "rollout_backend": "maxtext",
    "kv_tp_size": 1,
    "moe_mlp_tp_size": 1,
    "weight_sync_debug": False,
    "use_raiden_ffi": None,
    "vllm_load_format": "dummy",
    "mhc_pallas_kernel_bwd_feature_block_size": 1024,
}
# Keys that the classes of 0.2.4 already have.
IN_CLASSES = {"use_weight_converter", "rollout_tensor_parallelism", "weight_sync_debug", "vllm_load_format"}
# Prefixes of the keys for Megatron-LM's data.
OF_MMAP = ("mmap_", "blend_", "reset_attention_mask", "eod_mask_loss", "packing_max_segments_per_sample")
LINE = "python3 -m maxtext.trainers.pre_train.train run_name=x "
NNX = "which has no flags for NNX and Linen: it runs as nnx, with all three true"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def base_of(version, **changes):
    """Returns a file like a version's base.yml."""
    values = {name: value for name, value in yaml.safe_load(their_base()).items() if name not in ADDED} | changes
    if version == "0.2.5":
        known = {name: value for name, value in ADDED.items() if not name.startswith(OF_MMAP)}
        values = {name: value for name, value in values.items() if name not in FLAGS} | known
        values["dataset_type"] = "synthetic"
    return yaml.safe_dump(values, sort_keys=False)


def converted(line, version="", runs=TRAIN):
    return convert(parse([line]), runs, version)


def test_every_key_has_a_verdict_and_its_default_changes_nothing():
    for name, value in ADDED.items():
        if name.startswith(OF_MMAP) or name in schema().keys:
            continue
        verdict = verdicts.find(name)
        assert verdict is not None, name
        text = "none" if value is None else str(value)
        refused = any(line.startswith(name) for line in mistakes("stepps=1", f"{name}={text}"))
        assert refused == (name == "muon_include_routers"), name  # its default selects Muon for routers, which we lack
    assert set(verdicts.table()["versions"]["0.2.5"]) == ADDED.keys() - IN_CLASSES
    named = verdicts.table()["versions"]["0.2.4"]
    assert len(named) == 3
    assert set(FLAGS) <= set(named)  # empty here once Linen is removed
    (line,) = mistakes("muon_type=maxtext_muon")
    assert '(only "optax_muon" or "optax" is accepted)' in line


@pytest.mark.parametrize(("version", "data"), [("0.2.4", "stdlib"), ("0.2.5", "synthetic")])
def test_their_base_is_recognized(version, data):
    """0.2.5 has synthetic data by default, which needs no files, so the file decides."""
    write("theirs.yml", base_of(version))
    loaded = load(["theirs.yml"])
    assert loaded.warnings == []
    assert loaded.notes[0].startswith("theirs.yml is MaxText's base.yml")
    assert loaded.config.dataset_type == data
    assert loaded.changed.keys() == ({"dataset_type"} if version == "0.2.5" else set())


@pytest.mark.parametrize("tells", ["key", "environment", "base.yml", "changed base.yml", "child", "option"])
def test_a_command_without_a_dataset_type_means_what_it_meant(tells):
    write("theirs.yml", base_of("0.2.5", **{"steps": 7} if tells == "changed base.yml" else {}))
    write("child.yml", "base_config: theirs.yml\nsteps: 7\n")
    line, yml = LINE, "maxtext.yml"
    if tells == "key":
        line += "eval_sa_block_q=256"
    elif tells == "environment":
        line = f"M_EVAL_SA_BLOCK_Q=256 {LINE}"
    elif tells != "option":
        yml = "child.yml" if tells == "child" else "theirs.yml"
        line = LINE.replace("run_name", f"{yml} run_name")
        yml = "maxtext.yml" if tells == "base.yml" else yml
    made = converted(line, "0.2.5" if tells == "option" else "")
    assert made.words[3] == yml
    assert NNX in made.version
    assert made.loaded.config.dataset_type == "synthetic"
    assert combination(made.loaded.config) == "nnx"
    assert made.runs or yml != "maxtext.yml"


def test_an_earlier_command_reads_tfds():
    write("theirs.yml", base_of("0.2.4"))
    for line in (LINE.replace("run_name", "theirs.yml run_name"), f"{LINE} pure_nnx=true", LINE):
        made = converted(line)
        assert not made.runs
        assert "dataset_path=/data/tensorflow_datasets" in made.problems[0]
        assert not [word for word in made.words if word.startswith("dataset_type")]
    # Nothing reveals the version.
    assert "dataset_type is tfds by default; in 0.2.5 it is synthetic" in made.version
    assert converted(f"{LINE} dataset_type=synthetic").version == ""
    assert converted(f"{LINE} pure_nnx=true").version == ""
    assert converted("python3 -m maxtext.inference.decode prompt=x", runs=GENERATE).version == ""


@pytest.mark.skipif(len(COMBINATIONS) == 1, reason="there is one combination")
def test_a_dataset_type_and_flags_that_are_given_win():
    last = list(COMBINATIONS)[-1]
    flags = " ".join(f"{name}={value}" for name, value in flags_of(last).items())
    made = converted(f"{LINE} dataset_type=hf hf_path=json {flags}", "0.2.5")
    assert "dataset_type=synthetic" not in made.words
    assert "tokenizer_type=huggingface" in made.words
    made = converted(f"{LINE} {flags}", "0.2.5")
    assert combination(made.loaded.config) == last
    assert made.version.endswith(f"those given here make it {last}")
    write("own.yml", "base_config: maxtext.yml\ndataset_type: hf\nhf_path: json\nhf_train_files: x.json\n")
    made = converted(LINE.replace("run_name", "own.yml run_name"), "0.2.5")
    assert not [word for word in made.words if word.startswith("dataset_type")]
    write("own.yml", "base_config: maxtext.yml\n" + "".join(f"{word.replace('=', ': ')}\n" for word in flags.split()))
    made = converted(LINE.replace("run_name", "own.yml run_name"), "0.2.5")
    assert combination(made.loaded.config) == last
    assert made.words[3:] == ["own.yml", "dataset_type=synthetic", "run_name=x"]


def test_the_option(capsys):
    from_maxtext.main(["--maxtext=0.2.5", LINE])
    out = capsys.readouterr().out
    assert "maxtext.yml dataset_type=synthetic " in out
    assert NNX in out
    with pytest.raises(SystemExit):
        from_maxtext.main(["--maxtext=0.3", LINE])
    assert "--maxtext=0.3: the versions are 0.2.5 and 0.2.4" in capsys.readouterr().err


def test_keys_of_both_versions_tell_none():
    assert version_of(["steps", "dataset_type", "use_iota_embed"]) == ""
    assert version_of(["muon_type", "pure_nnx"]) == "0.2.5"


def test_presets_of_0_2_5():
    for name in ("qwen3.5-35b-a3b-fp8", "qwen3.5-397b-a17b-fp8", "weaver-mini", "weaver-max"):
        (line,) = mistakes(f"model_name={name}")
        assert "not supported yet" in line
