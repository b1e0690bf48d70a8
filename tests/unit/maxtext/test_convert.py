"""trainer.from_maxtext: the printed command does what trainer.train does with MaxText's command."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import from_maxtext
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.config.schema import schema
from trainer.maxtext import tools as maxtext_tools
from trainer.maxtext.command_line import as_text, parse
from trainer.maxtext.convert import TRAIN, convert, program
from trainer.maxtext.parameters import of_parameters
from trainer.maxtext.rows import DIFFERS, NO_EFFECT, REFUSED, SAME, by_kind, unchecked

DOCS = Path(__file__).parents[3] / "docs"
BEGIN = "python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml run_name=$RUN "
SYNTHETIC = f"{BEGIN}dataset_type=synthetic steps=10 "
ALWAYS_THERE = ("use_qk_norm=false", "use_qk_norm_in_gdn=True", "use_mrope=true")
# A tiny model with recurrent layers and experts.
RECURRENT = (
    "base_num_decoder_layers=8 inhomogeneous_layer_cycle_interval=4 gdn_num_key_heads=2 gdn_num_value_heads=4 "
    "head_dim=16 num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=12 shared_experts=1 partial_rotary_factor=0.5"
)
HF = (
    "dataset_type=hf hf_path=allenai/c4 hf_data_dir=en train_split=train tokenizer_type=huggingface tokenizer_path=$TOK"
)
GRAIN = "dataset_type=grain grain_train_files='/data/c4-train*,0.7;/data/code-train*,0.3' grain_worker_count=2"
# Commands of MaxText's users, in the order in which they appear in its guides and its TPU scripts.
LINES = (
    f"{SYNTHETIC}base_output_directory=$OUT",
    f"{BEGIN}base_output_directory=$OUT steps=1000 {HF}",
    f"{BEGIN}steps=1000 dataset_type=tfds dataset_path=$DATA dataset_name='c4/en:3.0.1' tokenizer_path=$TOK",
    f"{BEGIN}steps=1000 grain_file_type=arrayrecord {GRAIN}",
    "python3 -m maxtext.trainers.pre_train.train_compile base.yml compile_topology=v5e-256 "
    "compile_topology_num_slices=2 model_name=llama2-7b per_device_batch_size=4 "
    " ici_fsdp_parallelism=256 dcn_data_parallelism=2",
    f"{SYNTHETIC}per_device_batch_size=2 gradient_accumulation_steps=8",
    f"{SYNTHETIC}opt_type=muon muon_weight_decay=0.1 muon_consistent_rms=0.2 learning_rate=3e-4",
    f"{SYNTHETIC}enable_diloco=true ici_diloco_parallelism=2 diloco_sync_period=36 diloco_outer_lr=0.3",
    f"{SYNTHETIC}model_name=deepseek3-tiny override_model_config=true base_num_decoder_layers=4 sparse_matmul=false "
    "first_num_dense_layers=1 vocab_size=2048 mtp_num_layers=1 mtp_loss_scaling_factor=0.1 attention=dot_product",
    f"{SYNTHETIC}ici_data_parallelism=-1 ici_fsdp_parallelism=1 shard_optimizer_over_data=true shard_mode=explicit",
    f"{SYNTHETIC}model_name=llama2-7b ici_context_parallelism=4 ici_fsdp_parallelism=-1 packing=false "
    "context_parallel_strategy=all_gather per_device_batch_size=0.25 max_target_length=32768",
    f"{SYNTHETIC}profiler=xplane skip_first_n_steps_for_profiler=5 profiler_steps=3 metrics_file=metrics.txt "
    "enable_checkpointing=false eval_interval=5 eval_steps=2",
    'python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${MAXTEXT_CONFIGS_DIR:-${ROOT:-$PWD}/src/maxtext/configs}"'
    "/base.yml\\\n    steps=15 per_device_batch_size=2 enable_checkpointing=false\\\n    remat_policy=full "
    "global_parameter_scale=32\\\n    ici_tensor_parallelism=4 use_iota_embed=true reuse_example_batch=1\\\n"
    "    dataset_type=synthetic gcs_metrics=true attention='flash' quantization=\"\"",
    "export LIBTPU_INIT_ARGS='--a=true --b'\nM_STEPS=9 python MaxText/train.py MaxText/configs/base.yml "
    "model_name=llama3-8b dataset_type=synthetic enable_goodput_recording=False 2>&1 | tee log",
    f"{SYNTHETIC}nonsense=1 stepps=4 base_emb_dim=1.5 warmup_steps_fraction=2 --learning_rate=1 muon_beta=0.9",
    "M_STEPS=9 python3 -m MaxText.train base.yml steps=10 dataset_type=synthetic",
    f"{SYNTHETIC}model_name=llama3-8b hardware=gpu attention=cudnn_flash_te max_segments_per_seq=32",
    "python3 -m maxtext.inference.decode base.yml model_name=llama2-7b load_parameters_path=$CKPT/0/items "
    "tokenizer_path=$TOK per_device_batch_size=1 max_prefill_predict_length=16 max_target_length=64 "
    "prompt='I love to' decode_sampling_strategy=nucleus decode_sampling_nucleus_p=0.9",
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def outcome(argv, environment):
    """Returns the configuration of a command line, or the lines of its error message."""
    try:
        return load(argv, environment=environment).config.to_dict()
    except UserError as error:
        return sorted(str(error).split("\n  ")[1:])


def converted(line):
    command = parse([line])
    return command, maxtext_tools.converted(command, program(command.module).runs)


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_the_printed_command_does_what_the_original_does(line):
    """Keys that the command does not set have MaxText's defaults. Generation reads no data."""
    command, made = converted(line)
    generates = program(command.module).runs == "trainer.generate"
    theirs = outcome(["maxtext.yml", *command.words, *["dataset_type=synthetic"] * generates], command.environment)
    printed = parse([as_text(made.words)])
    assert printed.module == program(command.module).runs
    assert printed.yml == "maxtext.yml"
    ours = outcome([printed.yml, *printed.words], printed.environment)
    renamed = [row for row in made.rows if row.word.partition("=")[0] not in ("", row.given.partition("=")[0])]
    assert made.runs == isinstance(ours, dict)
    if renamed:  # the original is refused, with a message that names the printed key
        refused = "\n".join(theirs)
        assert all(f"{row.word.partition('=')[0]}=" in refused for row in renamed)
        theirs = [it for it in theirs if not any(it.startswith(f"{row.given} ") for row in renamed)]
    if isinstance(theirs, dict) and "dataset_type=hf" in line:
        theirs["tokenizer_type"] = "huggingface"  # as in MaxText's pipeline, whatever the key's value
    assert ours == theirs or (renamed and not theirs)
    # Each key has one verdict, and everything that stops the command is reported.
    told = {row.problem for row in made.rows} | set(made.problems)
    assert isinstance(ours, dict) or {it for it in ours if "such as" not in it} <= told
    assert len(made.rows) == len(command.words) + sum(name.startswith("M_") for name in command.environment)
    assert sum(map(len, by_kind(made.rows).values())) == len(made.rows)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", [2048, 16, 7168]),
        ("src/maxtext/configs/base.yml", [2048, 16, 7168]),
        ("base.yml global_parameter_scale=32", [8192, 32, 28672]),
        ("base.yml model_name=llama2-7b", [4096, 32, 11008]),
    ],
)
def test_what_a_command_does_not_say_is_maxtexts(words, sizes):
    _, made = converted(f"python3 -m maxtext.trainers.pre_train.train {words} dataset_type=synthetic")
    assert made.runs
    config = load(made.words[3:]).config
    assert [config[name] for name in ("base_emb_dim", "base_num_decoder_layers", "base_mlp_dim")] == sizes
    assert (config.per_device_batch_size, config.steps, config.learning_rate) == (12, 150001, 3e-5)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("tokenizer_path=/t model_name=qwen3-8b", "huggingface"),
        ("tokenizer_path=/t model_name=qwen3-30b-a3b", "sentencepiece"),
        ("tokenizer_path=/t dataset_type=hf hf_path=/h", "huggingface"),
        ("tokenizer_path=/t dataset_type=hf hf_path=/h tokenizer_type=sentencepiece", "sentencepiece"),
        ("tokenizer_path=/t/tokenizer_llama3.tiktoken", "tiktoken"),
    ],
)
def test_the_type_of_a_tokenizer_is_that_which_maxtext_chooses(words, kind):
    _, made = converted(f"{BEGIN}dataset_path=/d {words}")
    assert made.runs
    assert load(made.words[3:]).config.tokenizer_type == kind


MISSING = {
    f"{BEGIN}": "dataset_path tokenizer_path",
    f"{BEGIN}dataset_path=$DATA model_name=llama3-8b": "tokenizer_path",
    f"{BEGIN}dataset_type=hf": "hf_path tokenizer_path",
    f"{BEGIN}dataset_type=grain tokenizer_path=$TOK": "grain_train_files",
    "python3 -m MaxText.train_compile base.yml global_parameter_scale=16": "compile_topology",
    "python3 -m maxtext.inference.decode run_name=$RUN per_device_batch_size=1": "load_parameters_path tokenizer_path",
    "python3 -m maxtext.inference.decode load_parameters_path=$CKPT": "tokenizer_path",
}


@pytest.mark.parametrize("line", MISSING)
def test_what_is_missing_is_one_message_with_words_that_work(line):
    _, made = converted(line)
    (problem,) = made.problems
    assert not [row for row in made.rows if row.problem]
    names, words = re.findall(r"does not contain (.*); .* add (.*?)(?:, or |$)", problem)[0]
    assert names.split(", ") == MISSING[line].split()
    assert converted(f"{line} {words}")[1].runs
    load([*made.words[3:], *shlex.split(words)])
    if "or dataset_type=synthetic" in problem:
        assert converted(f"{line} dataset_type=synthetic")[1].runs


def test_a_yml_with_this_trainers_defaults_is_refused(tmp_path, monkeypatch):
    """Here the yml replaces base.yml in MaxText's command."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yml"
    for base, runs in (("base.yml", False), ("maxtext.yml", True)):
        mine.write_text(f"base_config: {base}\nsteps: 3\n")
        _, made = converted("python3 -m MaxText.train mine.yml dataset_type=synthetic")
        assert made.runs == runs
        assert made.words[3] == "mine.yml"
        assert runs or "base_config: maxtext.yml" in made.problems[0]


def test_a_key_has_the_verdict_of_the_table():
    """Redundant and neutral values are dropped, renamed keys are renamed, and other values stop both commands."""
    firsts = {(it.kind, it.why): it for it in verdicts.verdicts().values()}
    assert len(firsts) > 50
    for verdict in firsts.values():
        for value in ("1", *map(str, (verdict.neutral or ())[:1])):
            word = f"{verdict.name}={value}"
            (row,) = convert(parse(["base.yml", word]), TRAIN).rows
            try:
                load(["base.yml", word])
                refused = False
            except UserError as error:
                refused = f"  {word} (" in str(error)
            if verdict.kind == verdicts.RENAMED:
                assert row.word == f"{verdict.to}={value}"
            else:
                assert bool(row.problem) == refused
                assert row.kind == (verdict.kind if refused else verdicts.NEEDLESS)
                assert row.word == (word if refused else "")


def test_a_value_that_is_refused_is_told_before_what_differs_in_the_keys_meaning():
    (row,) = convert(parse(["base.yml", "scan_layers=perhaps"]), TRAIN).rows
    assert (row.kind, row.text) == (REFUSED, "not true or false; allowed: true or false")
    (row,) = convert(parse(["base.yml", "scan_layers=false"]), TRAIN).rows
    assert (row.kind, row.text) == (DIFFERS, verdicts.table()["meanings"]["scan_layers"])


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        (
            "rl.train_rl base.yml rl.num_generations=4 batch_size=2",
            {"rl.num_generations=4": SAME, "batch_size=2": SAME},
        ),
        ("rl.train_rl base.yml reward_functions=a,b", {"reward_functions=a,b": REFUSED}),
        ("dpo.train_dpo base.yml dpo.dpo_beta=0.2", {"dpo.dpo_beta=0.2": SAME}),
        ("dpo.train_dpo base.yml max_target_length=1024", {"max_target_length=1024": DIFFERS}),
        ("sft.train_sft base.yml max_target_length=1024", {"max_target_length=1024": SAME}),
    ],
)
def test_keys_of_post_training_have_verdicts(line, kinds):
    _, made = converted(f"python3 -m maxtext.trainers.post_train.{line}")
    assert kinds.items() <= {row.given: row.kind for row in made.rows}.items()


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("train_fraction=0.5", verdicts.NOT_YET),
        ("train_fraction=1", verdicts.NEEDLESS),
        ("muon_include_routers=true", verdicts.NOT_YET),
        ("muon_include_routers=false", verdicts.NEEDLESS),
        ("hf_subset=socratic", verdicts.NOT_YET),
        ("stop_strings=END", verdicts.NOT_YET),
        ("dataset_processor_path=/p.py", verdicts.NOT_YET),
        ("normalization_layer_epsilon=1e-5", DIFFERS),
        ("tokenizer_path=meta-llama/Llama-2-7b-hf", DIFFERS),
        ("tokenizer_path=/models/tokenizer", SAME),
        ("tokenizer_path=$DIR/tokenizer", SAME),
        ("qkv_proj=device", verdicts.NEEDLESS),
        ("fsdp_shard_on_exp=true", verdicts.NEEDLESS),
        ("model_name=qwen3-8b-base", SAME),
        ("attention=cudnn_flash_te", verdicts.RENAMED),
        ("compile_topology=a3", verdicts.RENAMED),
        ("profile_periodically_period=100", SAME),
    ],
)
def test_verdicts_agree_with_what_maxtext_does(word, kind):
    (row,) = convert(parse(["base.yml", word, "profiler=xplane"]), TRAIN).rows[:-1]
    assert row.kind == kind


def test_values_with_another_name_here_are_replaced():
    _, made = converted(f"M_ATTENTION=cudnn_flash_te {SYNTHETIC}compile_topology=a3")
    assert "M_ATTENTION=cudnn_flash_jax" in made.words
    assert made.words[-1] == "compile_topology=h100-8"
    assert made.loaded.config.attention == "cudnn_flash_jax"


@pytest.mark.parametrize(
    ("words", "kinds", "ours"),
    [
        (
            "model_name=gpt-oss-20b attention_sink=True mlp_bias=true routed_bias=true",
            {"attention_sink=True": verdicts.NEEDLESS, "mlp_bias=true": verdicts.NEEDLESS},
            {"routed_bias": False},  # here it is a buffer, but this family trains its bias
        ),
        ("decoder_block=gpt_oss mlp_bias=false", {"mlp_bias=false": REFUSED}, None),
        ("model_name=gpt-oss-120b routed_bias=False", {"routed_bias=False": REFUSED}, None),
        ("model_name=mixtral-8x7b mlp_bias=true", {"mlp_bias=true": verdicts.NOT_YET}, None),
        ("model_name=mixtral-8x7b mlp_bias=false", {"mlp_bias=false": verdicts.NEEDLESS}, {}),
        (
            "model_name=llama4-17b-128e rope_type=llama3.1 rope_use_scale=false",
            {"rope_type=llama3.1": verdicts.NEEDLESS, "rope_use_scale=false": verdicts.RENAMED},
            {"rope_type": "default"},
        ),
        (
            "model_name=llama4-17b-16e rope_use_scale=false",
            {"rope_use_scale=false": verdicts.RENAMED},
            {"rope_type": "default"},
        ),
        ("model_name=llama4-17b-16e rope_use_scale=true", {}, {"rope_type": "llama3.1"}),
        (
            f"decoder_block=qwen3_5 {RECURRENT} norm_topk_prob=true {' '.join(ALWAYS_THERE)}",
            {
                "decoder_block=qwen3_5": verdicts.RENAMED,
                **dict.fromkeys(ALWAYS_THERE, verdicts.NEEDLESS),
            },
            {"decoder_block": "qwen3_5_moe", "inhomogeneous_layer_cycle_interval": 4},
        ),
        (f"decoder_block=qwen3_next {RECURRENT} use_qk_norm=true", {"use_qk_norm=true": REFUSED}, None),
        (f"decoder_block=qwen3_next {RECURRENT} use_qk_norm_in_gdn=0", {"use_qk_norm_in_gdn=0": REFUSED}, None),
        (
            "decoder_block=llama2 inhomogeneous_layer_cycle_interval=4",
            {"inhomogeneous_layer_cycle_interval=4": NO_EFFECT},
            {},
        ),
    ],
)
def test_words_for_what_a_family_always_has_are_left_out_and_others_refused(words, kinds, ours):
    _, made = converted(f"{SYNTHETIC}{words}")
    assert kinds.items() <= {row.given: row.kind for row in made.rows}.items()
    assert made.runs == (ours is not None)
    if ours:
        assert ours.items() <= dict(made.loaded.config.items()).items()
        assert load(made.words[3:]).config == made.loaded.config
    if ours is None and REFUSED in kinds.values():
        block = "qwen3_next" if "qwen3_next" in words else "gpt_oss"
        assert any(f"models of decoder_block={block} always have" in row.problem for row in made.rows)


def test_the_parts_of_a_command():
    text = """# how we train
    cd src && RUN=a && M_STEPS=3 XLA_FLAGS="--x --y" \\
      python3 -m MaxText.train MaxText/configs/base.yml run_name=$RUN-1 \\
      prompt='I love' base_output_directory="gs://b/$(date +%F '%H')" > log 2>&1; echo done"""
    command = parse([text])
    assert command.module == "MaxText.train"
    assert command.yml == "MaxText/configs/base.yml"
    assert command.environment == {"M_STEPS": "3", "XLA_FLAGS": "--x --y"}
    assert command.words == ["run_name=a-1", "prompt=I love", "base_output_directory=gs://b/$(date +%F '%H')"]
    assert as_text(command.words[:2]) == "run_name=a-1 'prompt=I love'"
    assert as_text(command.words[2:]) == "\"base_output_directory=gs://b/$(date +%F '%H')\""
    # Wrapped by a launcher; given as words; without a program; with a line continuation that lost its newline.
    assert parse(['xpk workload create --command "python3 -m MaxText.train base.yml steps=1"']).words == ["steps=1"]
    assert parse(["python", "-m", "MaxText.train", "steps=1"]) == ("MaxText.train", {}, "", ["steps=1"])
    assert parse(["M_A=b", "base.yml", "steps=1"]) == ("", {"M_A": "b"}, "base.yml", ["steps=1"])
    assert parse(["python -m MaxText.train base.yml \\  steps=1"]).words == ["steps=1"]
    assert parse(["A=$(python3 -m MaxText.train steps=1)"]).module == ""
    for bad in ([""], [], ["python -m MaxText.train 'a=b"]):
        with pytest.raises(UserError):
            parse(bad)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m MaxText.train base.yml steps=$((1 + 2))", ["steps=3"]),
        ("N=4; python3 -m MaxText.train steps=$((N * (2 + 1) / 5)) dcn=$((${N} % 3))", ["steps=2", "dcn=1"]),
        (
            "python3 -m MaxText.train steps=$((N+1)) a=$((1/0)) b=$((2**9))",
            ["steps=$((N+1))", "a=$((1/0))", "b=$((2**9))"],
        ),
        ('CMD="python3 -m MaxText.train base.yml steps=1"', ["steps=1"]),
        ('S=3\nexport CMD="python3 -m MaxText.train base.yml steps=$S"; eval $CMD', ["steps=3"]),
        ('CMD="python3 -m MaxText.train base.yml"\n$CMD model_name=llama2-7b', ["model_name=llama2-7b"]),
        ('python3 xpk.py create --command="python3 -m MaxText.train base.yml steps=1" --x', ["steps=1"]),
        ("python3 -m MaxText.train steps=1 # a note", ["steps=1"]),
        ("python3 -m pip install x && python3 -m MaxText.train steps=1", ["steps=1"]),
    ],
)
def test_arithmetic_quoted_commands_and_comments(text, words):
    command = parse([text])
    assert command.module == "MaxText.train"
    assert command.words == words


def test_values_of_a_shell_are_not_checked():
    _, made = converted(f"{SYNTHETIC}per_device_batch_size=$B model_name=$MODEL base_output_directory=gs://b/$OUT")
    assert made.runs
    assert unchecked(made.words) == ["per_device_batch_size=$B", "model_name=$MODEL"]
    _, made = converted(f"{BEGIN}dataset_type=$TYPE use_multimodal=$M")
    assert made.runs
    assert unchecked(made.words) == ["dataset_type=$TYPE", "use_multimodal=$M"]


def test_what_differs_is_a_key_or_a_value_of_it_and_is_in_the_guide():
    page = (DOCS / "from-maxtext.md").read_text()
    for pattern, text in verdicts.table()["meanings"].items():
        name = pattern.partition("=")[0]
        assert name.removeprefix("M_").lower() in schema().keys
        assert f"`{name}" in page
        assert text == text.strip(" .")
        assert len(text) < 110


def test_programs_that_replace_one_of_maxtexts_exist():
    for row in verdicts.table()["modules"]:
        runs = row.get("runs", "").partition(" ")[0]
        assert bool(runs) != bool(row.get("why"))
        assert not runs or importlib.util.find_spec(runs)
        for name in re.findall(r"trainer\.\w+|scripts/\w+\.py", row.get("why", "")):
            found = importlib.util.find_spec(name) if name.startswith("trainer") else (DOCS.parent / name).is_file()
            assert found, name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -m MaxText.decode_multi base.yml", "use trainer.serve"),
        ("python -m maxtext.trainers.post_train.distillation.save_top_k_teacher_logits", "save_teacher_logits=FOLDER"),
        ("python -m MaxText.trian base.yml", "nearest: train;"),
        (
            "python -m maxtext.checkpoint_conversion.to_huggingface base.yml model_name=llama2-7b",
            "LOAD_PARAMETERS_PATH",
        ),
        (f"{SYNTHETIC}stepps=4 num_experts=8", "2 mistakes"),
        ("python -m MaxText.train_compile base.yml dataset_type=synthetic", "compile_topology"),
    ],
)
def test_what_stops_is_one_message_and_code_2(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        from_maxtext.main([line])
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_command_that_generates_keeps_its_words(capsys):
    from_maxtext.main([LINES[-1]])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("python -m trainer.generate maxtext.yml dataset_type=synthetic model_name=llama2-7b")


HF = (
    "python3 -m maxtext.checkpoint_conversion.to_huggingface base.yml load_parameters_path=/c base_output_directory=/o "
)
MT = "python3 -m maxtext.checkpoint_conversion.to_maxtext base.yml base_output_directory=/o --hf_model_path=/h "
PARAMS = "python3 -m maxtext.utils.generate_param_only_checkpoint base.yml base_output_directory=/o "


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (f"{HF}model_name=qwen3-8b scan_layers=true", "/c /o format=hf dtype=float32 model_name=qwen3-8b"),
        (f"{HF}model_name=$M weight_dtype=bfloat16", "/c /o format=hf dtype=bfloat16 model_name=$M"),
        (
            f"{HF}model_name=qwen3-8b base_num_decoder_layers=2 attention=flash",
            "/c /o format=hf dtype=float32 model_name=qwen3-8b base_num_decoder_layers=2",
        ),
        (f"M_WEIGHT_DTYPE=bfloat16 {HF}model_name=qwen3-8b", "/c /o format=hf dtype=bfloat16 model_name=qwen3-8b"),
        (f"{MT}model_name=qwen3-8b", "/h /o format=params dtype=bfloat16"),
        (f"{MT}model_name=qwen3-8b --save_dtype float32", "/h /o format=params dtype=float32"),
        (
            f"{PARAMS}model_name=llama2-7b load_parameters_path=/c force_unroll=true",
            "/c /o format=params dtype=bfloat16 model_name=llama2-7b",
        ),
        (
            f"{PARAMS}model_name=gpt3-6b load_full_state_path=/f",
            "/f /o format=params dtype=bfloat16 model_name=gpt3-6b",
        ),
        (
            f"{PARAMS}load_parameters_path=/c decoder_block=mixtral num_experts=4 base_moe_mlp_dim=64",
            "/c /o format=params dtype=bfloat16 decoder_block=mixtral num_experts=4 base_moe_mlp_dim=64 "
            "base_emb_dim=2048 base_num_query_heads=16 base_num_kv_heads=16 base_num_decoder_layers=16 head_dim=128 "
            "vocab_size=32000",
        ),
        (
            f"{PARAMS}load_parameters_path=/c global_parameter_scale=4 vocab_size=64",
            "/c /o format=params dtype=bfloat16 vocab_size=64 base_emb_dim=4096 base_num_query_heads=32 "
            "base_num_kv_heads=32 base_mlp_dim=14336 base_num_decoder_layers=16 head_dim=128",
        ),
    ],
)
def test_a_conversion_has_the_model_and_the_dtype_of_its_command(line, printed):
    _, made = converted(line)
    assert made.runs
    assert made.words == ["python", "-m", "trainer.export", *printed.split()]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{HF}model_name=gemma4-31b", "the family gemma4"),
        (f"{MT}model_name=gemma4-31b", "the family gemma4"),
        (f"{HF}model_name=llama9-1b", "no such preset"),
        (f"{HF}model_name=llama2-7b lora.lora_restore_path=/l", "/l: an adapter is exported with its base"),
        (f"{MT}model_name=llama2-7b hf_lora_adapter_path=/l", "/l: an adapter is exported with its base"),
        (f"{HF}model_name=llama2-7b weight_dtype=float16", "weight_dtype=float16"),
        (f"{MT}model_name=llama2-7b --save_dtype=float16", "dtype=float16: trainer.export writes"),
        (
            f"{HF}model_name=llama2-7b base_output_directory=gs://b/o",
            "gs://b/o: trainer.export writes to a local folder",
        ),
        (f"{HF}scan_layers=true", "give MODEL_NAME"),
        (f"{PARAMS}model_name=llama2-7b", "give LOAD_PARAMETERS_PATH"),
        ("python3 -m maxtext.checkpoint_conversion.standalone_scripts.convert_gemma2_chkpt --model_size 2b", "Gemma"),
        ("python3 -m maxtext.inference.decode base.yml run_name=r", "load_parameters_path"),
        ("python3 -m maxtext.trainers.pre_train.train --help", "unknown option"),
    ],
)
def test_another_model_is_never_a_success(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        from_maxtext.main([line])
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert said in printed.out + printed.err


def test_keys_of_parameters_are_those_that_an_export_takes():
    from trainer.config.capabilities.quantization_keys import OF_STORED
    from trainer.weights.model_keys import MODEL

    of_float = MODEL & schema().keys.keys() - set(OF_STORED)
    assert {name for name in schema().keys if of_parameters(name)} == of_float


def test_a_tools_command_takes_the_values_of_its_keys(capsys):
    from_maxtext.main(["python -m maxtext.checkpoint_conversion.inspect_checkpoint orbax --path /c/0/items"])
    assert capsys.readouterr().out.splitlines() == ["python -m trainer.inspect /c/0/items", "", "needless   orbax"]


def test_the_page_is_aligned_and_narrow(capsys):
    with pytest.raises(SystemExit):
        from_maxtext.main([f"{LINES[11]} enable_jax_profiler=true"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("python -m trainer.train maxtext.yml run_name=$RUN dataset_type=synthetic steps=10")
    assert max(map(len, lines)) <= 160
    texts = ("there is no profiler server", "MaxText's field names")
    column = {line.index(text) for line in lines for text in texts if text in line}
    starts = [re.match(r"(not yet|differs|needless) +\S+ +", line) for line in lines]
    assert len({found.end() for found in starts if found}) == 1
    assert column


def test_the_guide_shows_what_is_printed(capsys):
    page = (DOCS / "from-maxtext.md").read_text()
    asked, shown = re.findall(r"```(?:bash|text)\n(.*?)```", page, re.DOTALL)[:2]
    (command,) = re.findall("from_maxtext '(.*)'", asked, re.DOTALL)
    from_maxtext.main([command])
    assert capsys.readouterr().out.partition("\nnotes that the command prints")[0] == shown


def test_it_needs_no_jax_and_little_time():
    code = (
        f"import sys; from trainer.from_maxtext import main; main([{LINES[0]!r}]); "
        "assert not {'jax', 'flax'} & set(sys.modules); "
        "import time; assert time.process_time() < 1.5"  # 0.25 s on an idle machine, twice that on a busy one
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("preset", "theirs"),
    [
        ("deepseek3-671b", {"n_routing_groups": -1, "topk_routing_group": -1}),
        ("deepseek2-236b", {"n_routing_groups": -1, "topk_routing_group": -1}),
        ("llama3.3-70b", {"rope_type": "default"}),
        ("qwen2.5-14b", {"normalization_layer_epsilon": 1e-6}),
        ("gemma2-2b", {"vocab_size": 256128}),
    ],
)
def test_a_preset_that_was_corrected_is_maxtexts_and_a_line_says_so(preset, theirs):
    line = "python3 -m maxtext.trainers.pre_train.train base.yml dataset_type=synthetic model_name="
    _, made = converted(line + preset)
    assert {name: made.loaded.config[name] for name in theirs} == theirs
    (row,) = [row for row in made.rows if row.given.startswith("model_name=")]
    assert row.kind == DIFFERS
    assert all(f"{name}=" in row.text for name in theirs)
    _, made = converted(f"{line}{preset} " + " ".join(f"{name}={value}" for name, value in theirs.items()))
    assert [row.kind for row in made.rows if row.given.startswith("model_name=")] == [SAME]  # explicitly given


def test_a_dropout_rate_has_an_effect_where_it_has_in_maxtext():
    for preset, kind in (("gemma2-2b", DIFFERS), ("llama2-70b", DIFFERS), ("llama2-7b", NO_EFFECT)):
        line = "python3 -m maxtext.trainers.pre_train.train base.yml dataset_type=synthetic dropout_rate=0.1"
        _, made = converted(f"{line} model_name={preset}")
        assert [row.kind for row in made.rows if row.given == "dropout_rate=0.1"] == [kind]


def test_what_a_generation_reads_has_an_effect_without_data():
    words = "prompt=x decode_sampling_strategy=topk use_chat_template=true quantize_kvcache=true add_bos=false"
    command = "python3 -m maxtext.inference.decode model_name=llama2-7b tokenizer_path=/t load_parameters_path=/c "
    _, made = converted(f"{command}{words} decode_sampling_top_k=5 decode_sampling_nucleus_p=0.5")
    assert made.runs
    assert [row.given for row in made.rows if row.kind == NO_EFFECT] == ["decode_sampling_nucleus_p=0.5"]


def test_the_estimator_is_a_plan():
    command = "python3 -m maxtext.utils.estimator src/maxtext/configs/base.yml compile_topology=v5e-16 dataset_type=hf "
    command = parse([f"{command} hf_path=allenai/c4 model_name=llama2-7b max_target_length=2048"])
    made = convert(command, program(command.module).runs)
    assert made.runs
    assert as_text(made.words).startswith("python -m trainer.plan maxtext.yml ")
    assert {"compile_topology=v5e-16", "max_target_length=2048"} <= set(made.words)
    lacking = parse(["python3 -m maxtext.utils.estimator src/maxtext/configs/base.yml model_name=llama2-7b"])
    assert "compile_topology=v5e-16" in convert(lacking, program(lacking.module).runs).problems[0]
