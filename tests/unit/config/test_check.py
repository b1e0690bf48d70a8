"""Contradictory settings, and settings without effect."""

import pytest

from trainer import train, train_compile
from trainer.config.derived import DCN, ICI, UNUSED_AXES
from trainer.config.errors import NotBuilt, UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.config.schema import schema

MMAP = "dataset_type=grain grain_train_files=x grain_file_type=mmap"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("max_num_checkpoints_to_keep=0", "max_num_checkpoints_to_keep=0 .*: must be at least 1, or none to keep all"),
        ("load_parameters_path=a load_full_state_path=b", "load_parameters_path=.*: give only one of them"),
        ("opt_type=muon adam_eps=0", "adam_eps=0.0 .*: muon divides each matrix by its norm plus adam_eps"),
        ("skip_step_interval=7", r"skip_step_interval=7.*\[8, 65536\]"),
        ("skip_step_scaling_factor=0", r"skip_step_scaling_factor=0.*\(0, 3.4e\+38\]"),
        ("run_name=a/b", "the name of one folder"),
        ("run_name=..", "the name of one folder"),
        ("run_name=a\x1b[2Jb", "without / or control characters"),
        ("base_output_directory=s3://bucket/x", "only gs:// is supported for remote paths"),
        ("load_parameters_path=az://bucket/x", "only gs:// is supported for remote paths"),
        ("dataset_type=tfds dataset_name=x dataset_path=ftp://bucket/x", "data are read from gs://"),
        ("data_cache_directory=gs://bucket/x", "remote paths are not supported yet"),
        ("process_id=0", "give all three or none"),
        ("coordinator_address=a:1 num_processes=2", "give all three or none"),
        ("coordinator_address=a num_processes=2 process_id=0", "must be host:port; nearest: a:1234"),
        ("coordinator_address=a:1 num_processes=2 process_id=2", "start at 0; the largest is process_id=1"),
        ("data_pipeline=streaming", "stdlib is prepared .* set data_pipeline=prepared"),
        ("dataset_type=synthetic data_pipeline=streaming", "synthetic is generated row by row"),
        (f"{MMAP} data_pipeline=streaming", "memory-mapped files"),
        (f"{MMAP}_npy packing=false", "set packing=true"),
        (f"{MMAP} batch_invariant=true max_target_length=256", "set reset_attention_mask=false"),
        ("batch_invariant=true max_target_length=192", "rows must be a multiple of 128 tokens"),
        (f"{MMAP} tokenizer_type=bytes tokenizer_path=x", "no file"),
        (f"{MMAP}_npy mmap_npy_split=99", "such as 99,1"),
        (f"{MMAP}_npy mmap_npy_split=99,0", "such as 99,1"),
        (f"{MMAP}_npy mmap_npy_split=1,-1", "such as 99,1"),
        ("dataset_type=tfds dataset_path=x", "dataset_type=tfds needs dataset_name, such as dataset_name=c4"),
        ("dataset_type=tfds dataset_name=x", "dataset_type=tfds needs dataset_path, such as dataset_path="),
        ("dataset_type=hf", "dataset_type=hf needs hf_path, such as hf_path="),
        ("dataset_type=grain", "dataset_type=grain needs files"),
        ("dataset_type=grain grain_train_files=a,0;b,1", "'a' with weight '0' is not a valid part of a mixture"),
        (
            "dataset_type=grain grain_train_files=a grain_train_mixture_config_path=b",
            "both name the training files",
        ),
        ("dataset_type=grain grain_train_files=a grain_eval_files=b,1", "once, without weights"),
        ("dataset_type=hf hf_path=x train_data_columns=[a,b,c]", "one column, or two"),
        ("eval_data_columns=[]", "one column, or two"),
        ("tokenizer_type=sentencepiece", "tokenizer_type=sentencepiece needs a file"),
        ("tokenizer_type=bytes tokenizer_path=x", "tokenizer_type=bytes takes no file"),
        ("dataset_type=hf hf_path=x tokenize_train_data=false", "cannot be trained on token ids"),
        (
            "dataset_type=grain grain_file_type=text grain_train_files=x tokenize_train_data=false",
            "text files do not hold token ids",
        ),
        (
            "keep_best_checkpoints=1 checkpoint_period=100 eval_interval=50",
            "checkpoint_period must divide eval_interval",
        ),
        ("base_output_directory=", "empty; use"),
        (
            "base_num_query_heads=8 base_num_kv_heads=3",
            r"=8 \(command line\), base_num_kv_heads=3 \(command line\): .*kv_heads=2",
        ),
        ("ici_diloco_parallelism=2", "only DiLoCo uses the mesh axis diloco; set enable_diloco=true"),
        ("dcn_diloco_parallelism=2", "only DiLoCo uses the mesh axis diloco"),
        (
            "enable_diloco=true ema_decay=0.9",
            "export use the outer parameters, an average over islands; set ema_decay=0",
        ),
        ("enable_diloco=true logical_axis_rules=[[embed,diloco]]", "the rule of embed names the mesh axis diloco"),
        ("enable_streaming_diloco=true", "streaming requires DiLoCo; set enable_diloco=true, too"),
        (
            "enable_diloco=true enable_streaming_diloco=true base_num_decoder_layers=3 num_diloco_fragments=5",
            "3 layers can be divided into at most 4 fragments: one for each layer, and one for the parameters outside",
        ),
        (
            "enable_diloco=true enable_streaming_diloco=true diloco_sync_period=2 num_diloco_fragments=3",
            "3 fragments cannot synchronize one after the other within 2 steps; give at most 2 fragments",
        ),
        (
            "enable_diloco=true enable_streaming_diloco=true diloco_sync_period=11 num_diloco_fragments=3 "
            "num_communication_overlapping_steps=3",
            r"3 fragments in 11 steps can be only 11 // 3 = 3 steps apart, so num_.*_steps must be less than 3",
        ),
        ("enable_diloco=true num_diloco_fragments=0", "num_diloco_fragments=0"),
        ("head_dim=33", "must be even.*nearest: 32 or 34"),
        ("rope_min_timescale=10000", "less than the longest"),
        (
            "rope_type=llama3.1 rope_low_freq_factor=5",
            r"rope_low_freq_factor=5.0 \(command line\), rope_high_freq_factor=4.0 \(default\): .*must not be greater",
        ),
        ("rope_type=yarn beta_slow=33", "beta_slow must not be greater than beta_fast"),
        (
            "attention_type=local_sliding",
            r"sliding_window_size=0 \(default\): a sliding window needs at least one token",
        ),
        ("mlp_activations=[]", "one activation, or two"),
        ("mlp_activations=[silu,gelu,linear]", "one activation, or two"),
        ("mlp_activations=[silo,linear]", "no activation silo; allowed: .*nearest: silu"),
        (
            "lr_schedule_type=wsd warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5",
            "warm-up and decay together are 1.1",
        ),
        ("steps=-1", "with -1 each follows the other"),
        ("adamw_mask=[ok,'(']", "is not a regular expression"),
        ("trainable_parameters_mask=[+]", "is not a regular expression"),
        (
            "ici_data_parallelism=-1",
            r"=-1 \(command line\), .*ici_fsdp_parallelism=-1 \(default\), .*only one of them may be -1",
        ),
        ("dcn_fsdp_parallelism=-1", r"dcn_data_parallelism=-1 \(default\), .*only one of them may be -1"),
        (
            "ici_context_autoregressive_parallelism=4",
            r"\n  ici_context_auto\S*=4 \(command line\): context parallelism .*; leave it at 1$",
        ),
        ("dcn_context_autoregressive_parallelism=2", "parallelism for inference is not supported yet; leave it at 1"),
        (
            "ici_autoregressive_parallelism=-1",
            "nothing uses this axis; trainer.generate uses data, fsdp and tensor; leave",
        ),
        ("dataset_type=stdlib vocab_size=256", "vocab_size=256 .*: must be at least 257"),
        ("dataset_type=stdlib max_target_length=15", "max_target_length=15 .*: must be at least 16"),
    ],
)
def test_contradictions(words, message):
    with pytest.raises(UserError, match=message) as caught:
        load(words.split())
    assert "1 mistake in" in str(caught.value)


@pytest.mark.parametrize("key", [keys[axis] for axis in UNUSED_AXES for keys in (ICI, DCN)])
@pytest.mark.parametrize("main", [train.main, train_compile.main])
def test_what_is_not_built_is_also_a_not_implemented_error(main, key, capsys):
    """It still ends with code 2, and is reported together with the other errors."""
    words = ["base.yml", f"{key}=2", "stps=3", "compile_topology=cpu-8"]
    with pytest.raises(NotImplementedError) as caught:
        main.__wrapped__(words)
    assert isinstance(caught.value, UserError)
    assert "mistakes in the configuration:\n  stps=3" in str(caught.value)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"\n  {key}=2 (command line): " in capsys.readouterr().err


@pytest.mark.parametrize("key", [ICI["context_autoregressive"], DCN["context_autoregressive"]])
def test_what_is_not_built_is_refused_after_loading_too(key):
    config = load(["base.yml", "dataset_type=synthetic"]).config
    config[key] = 2
    with pytest.raises(
        NotBuilt, match=f"{key}=2: context parallelism for inference is not supported yet; leave it at 1"
    ):
        resolve(config, device_count=8, platform="cpu")


def test_other_mistakes_are_not_called_unbuilt():
    with pytest.raises(UserError) as caught:
        load(["stps=3"])
    assert not isinstance(caught.value, NotImplementedError)
    with pytest.raises(NotBuilt, match="only gs:// is supported for remote paths"):
        load(["base_output_directory=s3://bucket/x"])


@pytest.mark.parametrize(
    "words",
    [
        "opt_type=adamw adam_eps=0",
        "skip_step_on_spikes=true",  # with the default interval, which is also MaxText's
        "skip_step_on_spikes=true skip_step_interval=8",
        "warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5",
        "lr_schedule_type=wsd warmup_steps_fraction=0.7 wsd_decay_steps_fraction=0.3",
        "steps=-1 learning_rate_schedule_steps=100",
        "base_num_query_heads=8 base_num_kv_heads=2",
        "dataset_type=synthetic eval_interval=5 eval_steps=-1",
        "dataset_type=synthetic vocab_size=2 max_target_length=2",
        "dataset_type=stdlib vocab_size=257 max_target_length=16",
        "rope_type=llama3.1 rope_low_freq_factor=3.9",
        "rope_type=yarn beta_slow=31.9",
        "attention_type=local_sliding sliding_window_size=1",
        "dataset_type=tfds dataset_path=x dataset_name=y data_pipeline=streaming",
        "dataset_type=grain grain_train_files=/data/c4-train*,0.7;/data/code-train*,0.3 grain_worker_count=2",
        "dataset_type=hf hf_path=x tokenize_train_data=false tokenize_eval_data=false",
        "dataset_type=hf hf_path=x train_data_columns=[a,b] eval_data_columns=[a,b]",
        "dataset_type=hf hf_path=x tokenizer_path=y vocab_size=100",
        "keep_best_checkpoints=1 checkpoint_period=100 eval_interval=300",
        "mlp_activations=gelu",
        "mlp_activations=[relu,relu]",
        "run_name=naïve-1.b",
    ],
)
def test_neighbours_of_contradictions_pass(words):
    load(words.split())


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("lr_schedule_type=cosine wsd_decay_style=cosine", "wsd_decay_style", "lr_schedule_type"),
        ("lr_schedule_type=linear wsd_decay_steps_fraction=0.1", "wsd_decay_steps_fraction", "lr_schedule_type"),
        ("lr_schedule_type=constant learning_rate_final_fraction=0.5", "learning_rate_final_fraction", "constant"),
        ("opt_type=sgd adam_b1=0.8", "adam_b1", "sgd"),
        ("opt_type=sgd mu_dtype=bfloat16", "mu_dtype", "sgd_momentum=0"),
        ("opt_type=lion adam_b1=0.8", "adam_b1", "opt_type=lion does not read it"),
        ("diloco_outer_lr=0.7", "diloco_outer_lr", "enable_diloco=false"),
        ("sgd_momentum=0.9", "sgd_momentum", "opt_type=adamw does not read it"),
        ("opt_type=adafactor adamw_mask=[a]", "adamw_mask", "adafactor_weight_decay=0"),
        ("opt_type=sgd adamw_mask=[a]", "adamw_mask", "sgd"),
        ("adam_weight_decay=0 adamw_mask=[a]", "adamw_mask", "adam_weight_decay=0"),
        ("enable_dropout=false dropout_rate=0.1", "dropout_rate", "enable_dropout"),
        ("model_name=llama2-7b attention_dropout_rate=0.1", "attention_dropout_rate", "enable_dropout"),
        ("logits_via_embedding=false normalize_embedding_logits=false", "normalize_embedding_logits", "logits_via"),
        ("eval_interval=0 eval_steps=3", "eval_steps", "eval_interval"),
        ("eval_interval=-1 eval_per_device_batch_size=2", "eval_per_device_batch_size", "eval_interval"),
        ("prompt= decode_sampling_temperature=1", "decode_sampling_temperature", "prompt"),
        ("dataset_type=synthetic prompt=hello", "prompt", "tokenizer"),
        ("dataset_type=synthetic data_cache_directory=x", "data_cache_directory", "synthetic"),
        ("dataset_type=synthetic add_eos=false", "add_eos", "no documents"),
        ("dataset_type=synthetic max_segments_per_seq=2", "max_segments_per_seq", "no documents"),
        ("dataset_type=stdlib dataset_path=x", "dataset_path", "dataset_type is not tfds"),
        ("dataset_type=stdlib hf_train_files=x", "hf_train_files", "dataset_type is not hf"),
        ("dataset_type=stdlib grain_file_type=text", "grain_file_type", "dataset_type is not grain"),
        ("eod_mask_loss=true", "eod_mask_loss", "neither mmap nor mmap_npy"),
        (f"{MMAP} mmap_npy_split=9,1", "mmap_npy_split", "grain_file_type is not mmap_npy"),
        (f"{MMAP} tokenize_train_data=false", "tokenize_train_data", "contain token ids"),
        (f"{MMAP} grain_packing_type=first_fit", "grain_packing_type", "contain token ids"),
        (f"{MMAP} reset_attention_mask=false mmap_eod_id=1", "mmap_eod_id", "eod_mask_loss=false"),
        (
            f"{MMAP} reset_attention_mask=false packing_max_segments_per_sample=9",
            "packing_max_segments_per_sample",
            "reset_attention_mask=false",
        ),
        (f"{MMAP}_npy mmap_npy_split=9,1 held_out_share=0.1", "held_out_share", "mmap_npy_split divides"),
        ("dataset_type=stdlib train_split=x", "train_split", "neither tfds nor hf"),
        ("train_data_columns=x", "train_data_columns", "has its own files"),
        ("held_out_share=0.1", "held_out_share", "its own held-out rows"),
        ("dataset_type=hf hf_path=x hf_eval_split=y held_out_share=0.1", "held_out_share", "has its own documents"),
        ("sft_train_on_completion_only=false", "sft_train_on_completion_only", "one column"),
        ("grain_worker_count=2", "grain_worker_count", "prepared"),
        ("grain_shuffle_buffer_size=2", "grain_shuffle_buffer_size", "prepared"),
        ("packing=false max_segments_per_seq=2", "max_segments_per_seq", "packing=false"),
        ("use_truncation=true", "use_truncation", "concat_then_split"),
        (
            "dataset_type=grain grain_file_type=text grain_train_files=x train_data_columns=y",
            "train_data_columns",
            "no columns",
        ),
        ("dataset_type=synthetic enable_data_shuffling=false", "enable_data_shuffling", "synthetic"),
        ("enable_data_shuffling=false data_shuffle_seed=1", "data_shuffle_seed", "enable_data_shuffling"),
        ("override_model_config=true", "override_model_config", "the command line always overrides"),
        ("remat_policy=minimal context=device", "context", "remat_policy is not custom"),
        ("decoder_layer_input=offload", "decoder_layer_input", "remat_policy is not custom"),
        ("remat_policy=custom mlpwi=device", "mlpwi", "mlpwi_0 and mlpwi_1"),
        ("remat_policy=custom mlp_activations=gelu mlpwi_1=device", "mlpwi_1", "projection is mlpwi"),
        ("remat_policy=custom mlpwo=offload", "mlpwo", "does not read it"),
        ("sliding_window_size=4", "sliding_window_size", "no layer has a window"),
        ("rope_type=yarn rope_linear_scaling_factor=2", "rope_linear_scaling_factor", "rope_type is not default"),
        ("rope_factor=8", "rope_factor", "rope_type=default"),
        ("original_max_position_embeddings=8192", "original_max_position_embeddings", "rope_type=default"),
        ("rope_type=yarn rope_low_freq_factor=2", "rope_low_freq_factor", "not llama3.1"),
        ("rope_type=default rope_high_freq_factor=2", "rope_high_freq_factor", "not llama3.1"),
        ("rope_type=llama3.1 beta_fast=64", "beta_fast", "not yarn"),
        ("beta_slow=2", "beta_slow", "not yarn"),
        ("rope_truncate=false", "rope_truncate", "not yarn"),
        ("rope_type=llama3.1 rope_attention_scaling=true", "rope_attention_scaling", "not longrope or yarn"),
    ],
)
def test_a_key_without_effect_is_a_warning(words, key, reason):
    (line,) = load(words.split()).warnings
    assert line.startswith(f"{key}=")
    assert "(command line) has no effect" in line
    assert reason in line.partition("no effect: ")[2]


@pytest.mark.parametrize(
    "words",
    [
        "lr_schedule_type=wsd wsd_decay_style=cosine",
        "lr_schedule_type=constant warmup_steps_fraction=0.2",
        "opt_type=sgd",
        "enable_dropout=true dropout_rate=0.1",
        "eval_interval=10 eval_steps=3",
        "model_name=llama2-7b",
        "model_name=llama3.1-8b",
        "remat_policy=custom context=device mlpwi_0=offload decoder_layer_input=offload mlpwo=remat",
        "remat_policy=custom mlp_activations=gelu mlpwi=device",
        "attention_type=local_sliding sliding_window_size=4",
        "rope_linear_scaling_factor=2",
        "rope_type=llama3.1 rope_factor=4 original_max_position_embeddings=4096 rope_low_freq_factor=2",
        "rope_type=yarn rope_factor=4 beta_fast=16 rope_truncate=false rope_attention_scaling=true",
        "dataset_type=synthetic prompt=",
        "dataset_type=stdlib enable_data_shuffling=true data_shuffle_seed=1",
    ],
)
def test_keys_with_effect_are_not_warned_about(words):
    assert load(words.split()).warnings == []


def test_a_yml_may_repeat_a_default_without_effect(tmp_path):
    path = tmp_path / "my.yml"
    style = schema().keys["wsd_decay_style"].default
    path.write_text(
        f"base_config: base.yml\nlr_schedule_type: cosine\nwsd_decay_style: {style}\nwsd_decay_steps_fraction: 0.37\n"
    )
    (line,) = load([str(path)]).warnings
    assert line.startswith(f"wsd_decay_steps_fraction=0.37 ({path}:4)")


def test_the_preset_is_checked_together_with_what_is_given_beside_it():
    # base.yml has 2 of 6 key and value heads, llama3-8b 8 of 32, llama2-7b 32 of 32.
    with pytest.raises(
        UserError,
        match=r"base_num_query_heads=32 \(.*llama3-8b.yml:\d+\), base_num_kv_heads=3 .*nearest: base_num_kv_heads=2",
    ):
        load(["model_name=llama3-8b", "base_num_kv_heads=3"])
    assert load(["model_name=llama2-7b", "base_num_kv_heads=4"]).config.base_num_kv_heads == 4


@pytest.mark.parametrize("weight", ["1e999999999", "1e-999999999", "9" * 5000, "1/0", "nan", "x" * 5000])
def test_weights_of_a_mixture_are_numbers_of_a_few_digits(weight):
    with pytest.raises(UserError, match=r"with weight .* is not a valid part of a mixture") as caught:
        load(["dataset_type=grain", f"grain_train_files=a,{weight};b,1"])
    assert len(str(caught.value)) < 800
    load(["dataset_type=grain", "grain_train_files=a,2/3;b,1.5e-3;c,.5"])


@pytest.mark.parametrize(
    "key",
    ["base_output_directory", "load_parameters_path", "tokenizer_path", "compiled_trainstep_file", "metrics_file"],
)
def test_paths_that_no_file_system_takes(key):
    for value, problem in {
        "~nobody-of-that-name/x": "there is no home folder ~nobody-of-that-name",
        "x" * 256: "the name has 256 bytes; the limit is 255",
        "x/" * 2048 + "x": "the path has 4097 bytes; the limit is 4095",
    }.items():
        with pytest.raises(UserError, match=problem):
            load([f"{key}={value}"])


def test_a_run_name_is_no_longer_than_a_name_of_a_file():
    with pytest.raises(UserError, match=r"run_name=.*the name has 300 bytes; the limit is 255"):
        load([f"run_name={'x' * 300}"])
    load([f"run_name={'x' * 255}"])
    load(["run_name=~nobody-of-that-name"])


def test_braces_in_a_glob_are_not_expanded():
    said = r"'/a/\{x' with weight .* \(a comma separates a weight; braces are not expanded\); write glob,weight"
    with pytest.raises(UserError, match=said):
        load(["dataset_type=grain", "grain_train_files=/a/{x,y}*.arrayrecord"])
    with pytest.raises(UserError, match=r"grain_eval_files=.* and braces are not expanded; write glob;glob"):
        load(["dataset_type=grain", "grain_train_files=/a/*", "grain_eval_files=/a/{x,y}*"])


@pytest.mark.parametrize("path", ["/", ".", "folder/", "~", "/dev/null", "file/below", "file/far/below"])
def test_metrics_file_is_a_file_before_anything_is_prepared(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"metrics_file=.* is not a (file; choose another path|folder; give a file in a)"
    ):
        load([f"metrics_file={path}"])
    for good in ("file", "folder/file", "new/folder/file"):
        load([f"metrics_file={good}"])


def test_globs_of_a_mixture_are_paths_each():
    with pytest.raises(UserError, match="there is no home folder ~nobody-of-that-name"):
        load(["dataset_type=grain", "grain_train_files=a/*.jsonl,1;~nobody-of-that-name/*.jsonl,2"])
    load(["dataset_type=grain", f"grain_train_files={';'.join(f'{n:0200}/*.jsonl,1' for n in range(40))}"])
    spec = f"grain_train_files=/index|{':'.join(f'/data/{n:0200}/tokens' for n in range(40))}"
    assert load([*MMAP.split(), "grain_file_type=mmap_npy", spec]).config.grain_train_files
