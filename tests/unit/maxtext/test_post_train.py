"""MaxText's post-training commands default to its post_train/sft.yml, dpo.yml, rl.yml and distillation.yml."""

import os

import pytest
from config_cases import their_base, write

from trainer.config.capabilities.chat_keys import DISTILL, SFT_DEFAULTS
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.capabilities.rl_keys import RL_DEFAULTS
from trainer.config.files import POST_TRAIN, read_file
from trainer.config.from_model import taken_from_model
from trainer.config.load import load
from trainer.config.maxtext.base_yml import defaults
from trainer.config.schema import schema
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import COMPILE, DPO, GRPO, SFT, TRAIN, convert
from trainer.maxtext.rows import DIFFERS
from trainer.maxtext.tools import converted as convert_any

MODULES = {SFT: "sft.train_sft", DPO: "dpo.train_dpo", GRPO: "rl.train_rl", DISTILL: "distillation.train_distill"}
DATA = "tokenizer_path=/t hf_path=json hf_train_files=/d.json"
COLUMNS = "train_data_columns=[chosen,rejected] eval_data_columns=[chosen,rejected]"
MORE = {GRPO: " reward_functions=[m:f]", DISTILL: " teacher_path=/t"}
# Values that MaxText 0.2.5's own loader gives a command without a yml, where its base.yml has other values.
THEIRS = {
    SFT: {
        "dataset_type": "hf",
        "train_split": "train_sft",
        "hf_eval_split": "test_sft",
        "train_data_columns": ["messages"],
        "eval_data_columns": ["messages"],
        "learning_rate": 2e-5,
        "sft_train_on_completion_only": True,
        "steps": 150001,
        "per_device_batch_size": 12,
        "max_target_length": 2048,
    },
    DPO: {
        "dataset_type": "hf",
        "model_name": "qwen3-0.6b",
        "base_emb_dim": 1024,
        "enable_dropout": False,
        "train_data_columns": ["chosen", "rejected"],
        "eval_interval": 5,
        "eval_steps": 2,
        "gradient_clipping_threshold": 10.0,
        "learning_rate": 5e-7,
        "max_target_length": 2 * 512,  # for both sequences together
        "packing": False,
        "per_device_batch_size": 2,
        "steps": 10,
        "tokenizer_type": "huggingface",
    },
    GRPO: {
        "adam_b2": 0.99,
        "batch_size": 1,
        "decode_sampling_temperature": 0.9,
        "decode_sampling_top_k": 50,
        "decode_sampling_nucleus_p": 1.0,
        "data_shuffle_seed": 42,
        "gradient_clipping_threshold": 0.1,
        "learning_rate": 3e-6,
        "max_prefill_predict_length": 256,
        "max_target_length": 1024,
        "num_batches": 4,
        "rl_num_generations": 2,
        "rl_grpo_beta": 0.08,
        "remat_policy": "custom",
        "query_proj": "offload",
        "weight_dtype": "bfloat16",
    },
    DISTILL: {
        "dataset_type": "hf",
        "distill_alpha": 0.5,
        "distill_temperature": 1.0,
        "checkpoint_period": 2000,
        "learning_rate": 2e-4,
        "learning_rate_schedule_steps": -1,  # MaxText's 200000, which it ignores
        "log_period": 10,
        "max_target_length": 2048,
        "model_name": "llama3.1-8b",
        "packing": True,
        "per_device_batch_size": 2,
        "steps": 200000,
        "tokenizer_type": "huggingface",
        "use_distill": True,
    },
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def converted(runs, yml="", words=DATA):
    line = f"python3 -m maxtext.trainers.post_train.{MODULES[runs]} {yml} run_name=x {words}{MORE.get(runs, '')}"
    return convert_any(parse([line]), runs)


@pytest.mark.parametrize("runs", MODULES)
def test_a_command_without_a_yml_has_the_defaults_of_its_program(runs):
    made = converted(runs)
    assert made.runs
    assert made.words[3] == "maxtext.yml"
    found = {name: made.loaded.config[name] for name in THEIRS[runs]}
    assert found == THEIRS[runs]
    assert "without a yml, MaxText uses post_train/" in made.version


NAMES = {SFT: "sft", DPO: "dpo", GRPO: "rl", DISTILL: "distillation"}
DEFAULTS = {SFT: SFT_DEFAULTS, DPO: DPO_DEFAULTS, GRPO: RL_DEFAULTS, DISTILL: {"use_distill": True}}


@pytest.mark.parametrize("runs", MODULES)
def test_its_yml_may_be_named(runs):
    expected = converted(runs).words
    for folder in ("src/maxtext/configs", "$MAXTEXT/configs"):
        made = converted(runs, f"{folder}/post_train/{NAMES[runs]}.yml")
        assert made.runs
        assert made.words == expected
    for name in (f"src/maxtext/configs/post_train/{NAMES[runs]}.yml", f"post_train/{NAMES[runs]}.yml"):
        words = [name, *DATA.split(), *MORE.get(runs, "").split()]
        loaded = load(words, defaults=DEFAULTS[runs])
        assert loaded.config == load(["maxtext.yml", *words[1:]], defaults=DEFAULTS[runs]).config
        assert loaded.notes[0].startswith(f"{name}: using maxtext.yml")


def test_the_file_of_a_checkout_may_be_named():
    """With MaxText's Hub names, the file changes nothing. With a changed value, it is kept in the command."""
    text = "base_config: base.yml\nuse_sft: true\nuse_tunix_gradient_accumulation: true\nlearning_rate: {}\n"
    text += "lora: {{enable_lora: false}}\nhf_path: HuggingFaceH4/ultrachat_200k\ntrain_split: train_sft\n"
    os.makedirs("maxtext/configs/post_train")
    write("maxtext/configs/base.yml", their_base())
    write("maxtext/configs/post_train/sft.yml", text.format("2.e-5"))
    made = converted(SFT, "maxtext/configs/post_train/sft.yml")
    assert made.words == converted(SFT).words
    write("maxtext/configs/post_train/sft.yml", text.format("3.e-5"))
    assert converted(SFT, "maxtext/configs/post_train/sft.yml").words[3] == "maxtext/configs/post_train/sft.yml"


def test_base_yml_has_other_values_than_the_program():
    made = converted(DPO, "src/maxtext/configs/base.yml", f"dataset_type=hf steps=7 {COLUMNS} {DATA}")
    assert made.runs
    config = made.loaded.config
    assert (config.learning_rate, config.per_device_batch_size, config.max_target_length) == (3e-5, 12, 2 * 2048)
    assert (config.steps, config.model_name, config.use_dpo) == (7, "default", True)
    (row,) = [row for row in made.rows if row.given.endswith("base.yml")]
    assert "learning_rate" in row.text


@pytest.mark.parametrize(("runs", "other"), [(DPO, SFT), (DISTILL, SFT), (SFT, DISTILL)])
def test_the_yml_of_another_program_is_a_mistake(runs, other):
    name = f"src/maxtext/configs/post_train/{NAMES[other]}.yml"
    made = converted(runs, name)
    assert f"{name} has the values of {other}, and the program is {runs}" in made.problems


def test_what_the_yml_has_and_maxtext_yml_has_not_is_told():
    rows = {row.given.partition("=")[0]: row.kind for row in converted(GRPO).rows}
    assert rows["data_template_path"] == DIFFERS
    rows = {row.given.partition("=")[0]: row.kind for row in converted(DPO).rows}
    assert rows["model_name"] == rows["max_target_length"] == DIFFERS
    made = converted(SFT, words="")
    assert "the command does not contain hf_path, tokenizer_path" in made.problems[0]


def test_maxtext_yml_alone_means_the_program_too(tmp_path):
    """MaxText's values override the defaults of runs that start from a model. All given values override both."""
    write("own.yml", "base_config: maxtext.yml\nsteps: 5\n")
    words = [*DATA.split(), "load_parameters_path=/m"]
    loaded = load(["own.yml", *words], defaults=DPO_DEFAULTS)
    assert (loaded.config.learning_rate, loaded.sources["learning_rate"]) == (5e-7, "maxtext.yml, post_train/dpo.yml")
    assert (loaded.config.steps, loaded.config.warmup_steps_fraction) == (5, 0.1)
    assert taken_from_model(loaded.config, loaded.sources) == ""
    assert load(["maxtext.yml", "dataset_type=synthetic", *words[-1:]]).config.learning_rate == 3e-5


@pytest.mark.parametrize("method", POST_TRAIN)
def test_the_files_have_only_what_differs_from_maxtext_yml(method):
    base = {name: key.default for name, key in schema().keys.items()} | dict(defaults())
    entries, problem, _ = read_file(POST_TRAIN[method])
    assert problem is None
    assert [entry.name for entry in entries if defaults(method)[entry.name] == base[entry.name]] == []


@pytest.mark.parametrize("parent", ["post_train/dpo.yml", "maxtext.yml"])
def test_a_yml_of_ones_own_below_that_of_the_program(parent):
    """Where the program's yml differs from maxtext.yml, its values are added and reported, as without a yml."""
    write("own.yml", f"base_config: {parent}\nmax_target_length: 256\n")
    made = converted(DPO, "own.yml")
    assert made.runs
    assert (made.loaded.config.model_name, made.loaded.config.base_emb_dim) == ("qwen3-0.6b", 1024)
    rows = {row.given: row for row in made.rows}
    assert rows["max_target_length=256"].kind == rows["model_name=qwen3-0.6b"].kind == DIFFERS
    told = "if that was base.yml in MaxText, add dataset_type=tfds"
    assert (told in rows["own.yml"].text) == (parent == "maxtext.yml")
    assert made.version == ""  # dataset_type is hf in every version
    write("own.yml", f"base_config: {parent}\nmodel_name: qwen3-4b\n")
    assert converted(DPO, "own.yml").loaded.config.model_name == "qwen3-4b"


def test_a_yml_below_base_yml_gets_the_advice_that_keeps_its_values():
    write("own.yml", "base_config: base.yml\nsteps: 5\n")
    (problem,) = converted(SFT, "own.yml", f"dataset_type=hf {DATA}").problems
    assert "sft_train_on_completion_only=true (false)" in problem
    words = problem.partition("; add ")[2].partition(". ")[0].replace("'", "").split()
    write("own.yml", "base_config: maxtext.yml\nsteps: 5\n")
    made = converted(SFT, "own.yml", f"dataset_type=hf {DATA} {' '.join(words)}")
    config = made.loaded.config
    assert (config.learning_rate, config.sft_train_on_completion_only, config.steps) == (3e-5, False, 5)
    assert (config.train_split, config.train_data_columns) == ("train", ["text"])


def test_pre_training_with_use_sft_is_fine_tuning_with_the_values_of_base_yml():
    line = f"python3 -m maxtext.trainers.pre_train.train use_sft=true dataset_type=hf {DATA} run_name=x"
    made = convert(parse([line]), TRAIN)
    assert made.runs
    assert made.words[2] == SFT
    assert (made.loaded.config.learning_rate, made.loaded.config.sft_train_on_completion_only) == (3e-5, False)
    compiled = convert(parse(["python3 -m maxtext.trainers.pre_train.train_compile use_dpo=true run_name=x"]), COMPILE)
    assert "per_device_batch_size=12.0" in compiled.words


def test_a_program_without_its_method_is_refused():
    made = converted(SFT, words=f"{DATA} dataset_type=hf use_sft=false")
    assert not made.runs
    assert "use_sft=false" in made.problems[0]


@pytest.mark.parametrize("kind", ["yml", "word"])
def test_a_preset_named_in_a_yml_is_maxtexts_too(kind):
    write(
        "own.yml",
        "base_config: maxtext.yml\ndataset_type: synthetic\n" + "model_name: llama3.3-70b\n" * (kind == "yml"),
    )
    word = "model_name=llama3.3-70b" * (kind == "word")
    made = convert(parse([f"python3 -m maxtext.trainers.pre_train.train own.yml run_name=x {word}"]), TRAIN)
    assert made.loaded.config.rope_type == "default"
    assert [row.kind for row in made.rows if row.given == "model_name=llama3.3-70b"] == [DIFFERS]


def test_a_preset_in_the_environment_differs():
    made = convert(parse(["M_MODEL_NAME=llama2-7b python3 -m MaxText.train dataset_type=synthetic run_name=x"]), TRAIN)
    (row,) = [row for row in made.rows if row.given == "M_MODEL_NAME=llama2-7b"]
    assert row.kind == DIFFERS
