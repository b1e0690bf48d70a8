"""MaxText's keys and its defaults. For its base.yml see test_maxtext_base.py."""

import functools
import re
import subprocess
import sys

import pytest
import yaml
from config_cases import mistakes, notes, write

from trainer.config.errors import NotBuilt
from trainer.config.files import COMMAND_LINE, preset_names
from trainer.config.load import load
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.reader import Reader
from trainer.config.resolve import resolve
from trainer.config.schema import schema
from trainer.config.values import read_text

GROUPS = verdicts.table()["groups"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- The table


def test_no_key_of_base_yml_is_in_the_table():
    """A key that base.yml gains must be removed from the table."""
    assert not set(verdicts.verdicts()) & set(schema().keys)


def test_presets_that_are_not_here_say_what_to_use_and_that_loads():
    for row in verdicts.table()["presets"]:
        assert not set(row["names"]) & set(preset_names())
        if words := re.findall(r"[^\s,;]+=[^\s,;]+", row["why"]):
            load(["base.yml", *words])
        else:
            assert "not supported yet" in row["why"]


def test_maxtexts_other_names_of_presets_are_taken():
    for name, own in verdicts.table()["aliases"].items():
        preset = own["model_name"]
        assert preset in preset_names()
        assert name not in preset_names()
        theirs, ours = (load(["base.yml", f"model_name={it}", "dataset_type=synthetic"]) for it in (name, preset))
        differs = {key: value for key, value in theirs.config.items() if value != ours.config[key]}
        assert differs == own | {"model_name": name}
        assert not theirs.notes or "rope_max_timescale" not in str(theirs.notes)
    loaded = load(["base.yml", "model_name=qwen3-30b-a3b-base", "dataset_type=synthetic"])
    assert loaded.sources["rope_max_timescale"] == "preset qwen3-30b-a3b-base"


def test_maxtexts_other_names_of_values_are_taken(tmp_path):
    for name, values in verdicts.table()["values"].items():
        for theirs, row in values.items():
            assert load(["base.yml", f"{name}={row['ours']}"]).config[name] == row["ours"]
            assert theirs not in schema().keys[name].choices
    yml = tmp_path / "gpu.yml"
    yml.write_text("base_config: maxtext.yml\nattention: cudnn_flash_te\n")
    word = "attention=cudnn_flash_te"
    environment = {"M_ATTENTION": "cudnn_flash_te"}
    synthetic = "dataset_type=synthetic"
    for loaded in (load([str(yml), synthetic]), load([word, synthetic]), load([synthetic], environment=environment)):
        assert loaded.config.attention == "cudnn_flash_jax"
        (note,) = (note for note in loaded.notes if "cudnn" in note)
        assert note.startswith("MaxText's attention=cudnn_flash_te is cudnn_flash_jax here: cuDNN's kernels too")


def test_every_group_has_a_verdict_and_says_why():
    for group in GROUPS:
        assert group["verdict"] in (verdicts.RENAMED, verdicts.NEEDLESS, verdicts.NOT_YET, verdicts.NEVER)
        assert group["why"] == group["why"].strip(" .")
        assert "\n" not in group["why"]
        # MaxText reads dependents only together with one of the group's keys, so each group must have keys.
        assert group["keys"]
        assert set(group) <= {"verdict", "why", "to", "keys", "dependents"}
        assert ("to" in group) == (group["verdict"] == verdicts.RENAMED)
        assert group.get("to", "steps") in schema().keys
        if group["verdict"] == verdicts.NEEDLESS:
            assert isinstance(group["keys"], list)
            assert not group.get("dependents")
    names = [name for group in GROUPS for name in (*group["keys"], *group.get("dependents", ()))]
    assert len(set(names)) == len(names) == len(verdicts.verdicts())


def test_neutral_values_are_read_back_as_neutral():
    """Each value as a user writes it on a command line."""
    seen = 0
    for verdict in verdicts.verdicts().values():
        for value in verdict.neutral or ():
            given = value if isinstance(value, str) else "none" if value is None else str(value)
            assert verdict.accepts(functools.partial(read_text, text=given)), (verdict.name, value)
            seen += 1
    assert seen > 200


def test_former_defaults_are_values_of_known_keys():
    earlier = yaml.safe_load(verdicts.TABLE.read_text())["earlier"]
    keys = schema().keys
    assert set(earlier) <= set(keys) | set(verdicts.verdicts())
    for name, rows in earlier.items():
        for value in (value for values in rows.values() for value in values):
            # YAML reads 1e-5 as text, so a number must be written as 1.0e-5.
            assert not isinstance(value, str) or name not in keys or keys[name].kind is str, (name, value)


def test_former_defaults_are_told_by_the_keys_of_the_file():
    assert False in verdicts.former_defaults("enable_nnx", ["run_name"])
    assert False not in verdicts.former_defaults("enable_nnx", ["run_name", "kv_proj"])


def test_a_run_that_gives_none_of_these_keys_does_not_read_the_table():
    code = (
        "from trainer.config.load import load\nfrom trainer.config.maxtext import verdicts\n"
        "load(['steps=3', 'base_emb_dim=64'])\nprint(verdicts.table.cache_info().currsize)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


# ---- MaxText's keys on a command line


def test_neutral_values_and_harmless_keys_are_one_line_each_kind():
    words = (
        "first_num_hash_layers=0 logits_dot_in_fp32=false managed_mldiagnostics=False distill_layer_indices=[1] "
        "sharding_strategy=null checkpoint_conversion_fn=none engram_layers=[] "
        "use_iota_embed=true gcs_metrics=false hf_access_token=secret steps=10"
    )
    loaded = load(words.split())
    assert loaded.changed == {"steps": COMMAND_LINE}
    assert loaded.warnings == []
    first, *others = notes(*words.split())
    assert first.startswith(
        "MaxText's keys with values that change nothing here: first_num_hash_layers=0, logits_dot_in_fp32=false"
    )
    assert "engram_layers=[]" in first
    assert len(others) == 4
    assert "secret" not in str(others)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "target_eval_loss=2.5",
            "target_eval_loss=2.5 (command line): not supported yet (only 0.0 is accepted); instead: steps",
        ),
        ("enable_rampup_batch_size=true", "instead: per_device_batch_size and gradient_accumulation_steps"),
        ("first_num_hash_layers=1", "not supported yet (only 0 is accepted)"),
        ("logits_dot_in_fp32=true", "instead: dtype=float32"),
        ("rl.max_concurrency=4", "rl.max_concurrency=4 (command line): not supported yet"),
        ("managed_mldiagnostics=true", "not supported (only false is accepted)"),
        ("num_heads=8", "not supported; instead: base_num_query_heads and base_num_kv_heads"),
        ("warmup_steps=100", "not supported; instead: warmup_steps_fraction, a share of the schedule"),
        ("use_manual_quantization=true", "not supported yet (only false is accepted); leave it out; "),
        ("quantization=te_fp8_currentscaling", "nanoo_fp8, nf4; TransformerEngine is not used; fp8_gpu"),
        ("profiler=nsys", 'allowed: "", xplane; profile from outside: nsys profile python -m trainer.train ...'),
        ("mesh_axes=[data]", "instead: ici_* and dcn_* keys"),
        ("save_period=30", "an earlier name in MaxText; write checkpoint_period=30"),
        ("emb_dim=3", "MaxText computes it from base_emb_dim; write base_emb_dim=3"),
        ("moba=true", "not supported yet"),
    ],
)
def test_another_value_is_an_error_that_says_what_to_use(word, message):
    (line,) = mistakes(word)
    assert message in line


@pytest.mark.parametrize("verdict", [it for it in verdicts.verdicts().values() if it.kind == verdicts.RENAMED])
def test_what_a_renamed_key_advises_loads(verdict):
    """Uses a value that an earlier MaxText base.yml assigned to the old name."""
    rows = verdicts.table()["earlier"].get(verdict.name, {})
    value = next((value for values in rows.values() for value in values), schema().keys[verdict.to].default)
    reader = Reader(schema())
    assert reader.setting(verdict.to, str(value), "", functools.partial(read_text, text=str(value)))
    assert not reader.mistakes


def test_what_is_not_built_is_a_not_implemented_error():
    with pytest.raises(NotBuilt):
        load(["first_num_hash_layers=8"])


def test_nested_keys_of_a_yml():
    write("my.yml", "base_config: base.yml\nrl:\n  max_concurrency: 256\n  off_policy_steps: 0\n")
    assert load(["my.yml"]).changed == {}
    write("my.yml", "base_config: base.yml\nrl: {max_concurrency: 4}\n")
    (line,) = mistakes("my.yml")
    assert line.startswith("rl.max_concurrency=4 (my.yml:2): not supported yet")


def test_a_group_has_the_lines_and_warnings_of_its_own_keys():
    write(
        "my.yml", 'base_config: base.yml\nrl:\n  <<: {off_policy_steps: 0}\n  system_prompt: ""\n  max_concurrency: 4\n'
    )
    (line,) = mistakes("my.yml")
    assert line.startswith("rl.max_concurrency=4 (my.yml:5): not supported yet")
    write("my.yml", "base_config: base.yml\nlora:\n  lora_rank: 4\n  lora_rank: 8\n  [a, b]: 1\n")
    (line,) = mistakes("my.yml")
    assert line.startswith("lora.[a, b]=1 (my.yml:5): there is no key")
    write("my.yml", "base_config: base.yml\nlora:\n  lora_rank: 4\n  lora_rank: 8\n")
    line, *_ = load(["my.yml"]).warnings
    assert line == "my.yml:4: lora.lora_rank is given 2 times, first in line 3; the last one wins"
    assert "a group of MaxText's keys" in mistakes("lora={}")[0]


def test_a_key_of_a_group_is_the_key_without_the_group():
    """As MaxText's users write it: on a command line with a dot, in a yml nested."""
    write("my.yml", "base_config: base.yml\nlora: {enable_lora: true, lora_alpha: 16, lora_tile_size: null}\n")
    loaded = load(["my.yml", "lora.lora_rank=8", "lora.lora_weight_qtype=null"])
    assert [loaded.config[name] for name in ("enable_lora", "lora_rank", "lora_alpha")] == [True, 8, 16.0]
    assert [loaded.config[name] for name in ("lora_tile_size", "lora_weight_qtype")] == [0, ""]
    assert load(["lora_rank=3", "lora.lora_rank=4"]).config.lora_rank == 4
    (line,) = mistakes("lora.lora_rank=-1")
    assert line.startswith("lora.lora_rank=-1 (command line): out of range")
    (line,) = mistakes("lora.lora_ranks=1")
    assert "there is no key lora.lora_ranks" in line
    assert "lora.steps" in mistakes("lora.steps=1")[0]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("enable_goodput", "enable_goodput_recording"),
        ("hf_acess_token", "hf_access_token"),
        ("use_batch_split_schedul", "use_batch_split_schedule"),
    ],
)
def test_names_of_maxtext_are_near_too(word, name):
    (line,) = mistakes(f"{word}=1")
    assert line.endswith(f"; nearest: {name} (of MaxText)")


def test_names_of_base_yml_are_nearer():
    for word, name in (("device_batch_size", "per_device_batch_size"), ("head_dims", "head_dim")):
        assert mistakes(f"{word}=1")[0].endswith(f"; nearest: {name}")


# ---- Data keys without dataset_type


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("dataset_path=DATA", "tfds"),
        ("dataset_name=c4/en:3.0.1", "tfds"),
        ("train_split=train[:1%]", "tfds"),
        ("hf_path=allenai/c4 hf_data_dir=en", "hf"),
        ("grain_train_files=/data/*", "grain"),
        ("hf_path=json train_split=tr", "hf"),
        ("eval_split=test", "tfds"),
        ("eval_dataset_name=c4", "tfds"),
        ("hf_eval_files=a.json", "hf"),
        ("grain_eval_files=/x", "grain"),
    ],
)
def test_data_without_dataset_type_is_an_error(words, kind):
    (line,) = mistakes(*words.split(), "steps=100")
    (advice,) = re.findall(f"add (dataset_type={kind}.*), or dataset_type=stdlib", line)
    load([*words.split(), *advice.split()])  # following the advice leads to no second error
    write("my.yml", "base_config: base.yml\n" + words.split()[0].replace("=", ": '", 1) + "'\n")
    (line,) = mistakes("my.yml")
    assert "(my.yml:2)" in line
    given = load([*words.split(), "dataset_type=synthetic"])
    assert given.config.dataset_type == "synthetic"
    assert all("has no effect" in warning for warning in given.warnings)
    assert given.warnings


def test_a_default_said_again_names_no_data():
    assert load(["train_split=train", "dataset_path=", "eval_split=validation"]).config.dataset_type == "stdlib"


def test_a_dataset_type_that_does_not_exist_is_one_mistake():
    (line,) = mistakes("dataset_type=c4_mlperf", "dataset_path=/d")
    assert line.startswith("dataset_type=c4_mlperf (command line): ")


@pytest.mark.parametrize("word", ["dataset_path=gs://x", "tokenizer_path=gs://t/tok", "hf_eval_files=gs://x"])
def test_a_remote_path_without_effect_is_a_warning(word):
    (line,) = load(["dataset_type=synthetic", word]).warnings
    assert "has no effect" in line
    with pytest.raises(NotBuilt):
        load(["dataset_type=hf", "hf_path=d", "hf_eval_files=az://x"])


# ---- maxtext.yml


def test_maxtext_yml_differs_from_base_yml_in_every_line():
    for name, value in base_yml.defaults().items():
        assert value != schema().keys[name].default, name


@pytest.mark.parametrize("how", ["word", "parent", "grandparent"])
def test_maxtext_yml_gives_its_defaults(how, tmp_path):
    (tmp_path / "sub").mkdir()
    write("sub/one.yml", "base_config: maxtext.yml\nsteps: 7\n")
    write("two.yml", "base_config: sub/one.yml\n")
    words = {"word": ["maxtext.yml", "steps=7"], "parent": ["sub/one.yml"], "grandparent": ["two.yml"]}[how]
    loaded = load([*words, "dataset_type=synthetic"])
    theirs = base_yml.defaults()
    differing = {name for name, value in theirs.items() if loaded.config[name] != value}
    assert differing == {"steps", "dataset_type"}
    assert set(loaded.changed) == {"steps", "dataset_type"}
    assert loaded.warnings == []
    assert notes(*words, "dataset_type=synthetic") == []


def test_a_preset_wins_over_maxtext_yml():
    config = load(["maxtext.yml", "model_name=qwen3-0.6b", "dataset_type=synthetic"]).config
    assert (config.base_emb_dim, config.max_target_length) == (1024, 2048)


def test_maxtext_yml_takes_tfds_without_being_asked():
    words = ["maxtext.yml", "dataset_path=DATA", "tokenizer_path=TOK"]
    assert load(words).config.dataset_type == "tfds"


@pytest.mark.parametrize("kind", ["tfds", "hf", "grain"])
def test_compiling_ahead_needs_no_data(kind):
    words = ["maxtext.yml", "compile_topology=v5e-256", "model_name=llama2-7b", f"dataset_type={kind}"]
    config = load(words).config
    assert resolve(config, device_count=256, platform="tpu").max_target_length == 2048


# ---- Defaults that differ from what a user of MaxText would expect


@pytest.mark.parametrize(
    "words", [["model_name=llama2-7b", "dataset_type=synthetic"], ["dataset_type=hf", "hf_path=x"]]
)
def test_a_command_that_may_be_of_a_user_of_maxtext_has_one_line_on_defaults(words):
    others = "the defaults that apply differ from MaxText's (docs/from-maxtext.md)"
    assert notes(*words) == [f"{others}; for MaxText's, give maxtext.yml as the first argument"]
    assert notes("dataset_type=synthetic") == []


def test_a_key_of_maxtext_lists_the_other_defaults():
    words = ["model_name=llama2-7b", "dataset_type=synthetic", "steps=10", "max_target_length=64"]
    *differing, last, _ = notes(*words, "save_config_to_gcs=true")
    assert last == "for MaxText's defaults give maxtext.yml as the first argument"
    note = "\n".join(differing)
    assert "learning_rate=0.006 (3.0e-05)" in note
    assert "max_target_length" not in note
    note = "\n".join(notes("dataset_type=hf", "hf_path=x", "save_config_to_gcs=true"))
    assert "held_out_share=0.01 (0.0)" in note
    assert "grain_worker_count" not in note  # data_pipeline=prepared does not use these workers


# ---- Typical command lines, with our keys


@pytest.mark.parametrize(
    "words",
    [
        "run_name=r base_output_directory=o dataset_type=synthetic steps=10 enable_goodput_recording=False",
        "run_name=r dataset_type=synthetic gcs_metrics=true save_config_to_gcs=true enable_tensorboard=false steps=10",
        "dataset_type=synthetic hardware=cpu skip_jax_distributed_system=true enable_checkpointing=false steps=10",
        "dataset_type=synthetic use_iota_embed=true attention=flash remat_policy=full steps=10 scan_layers=false",
        "dataset_type=hf hf_path=allenai/c4 hf_data_dir=en train_split=tr tokenizer_path=t steps=10 hf_access_token=x",
        "dataset_type=grain grain_file_type=arrayrecord grain_train_files=/d/*,1 grain_ram_budget_mb=512 steps=10",
        "dataset_type=synthetic monitor_goodput=False shard_mode=auto allow_split_physical_axes=true steps=10",
    ],
)
@pytest.mark.parametrize("yml", ["src/maxtext/configs/base.yml", "base.yml"])
def test_lines_of_theirs_without_a_feature_that_is_missing_here_load(yml, words):
    assert load([yml, *words.split()]).config.steps == 10


def test_groups_of_rewards_and_preferences_spell_our_keys():
    words = "rl.num_generations=4 rl.grpo_beta=0 rl.epsilon_high=null dpo.algo=orpo dpo.dpo_beta=0.2"
    config = load([*words.split(), "dpo.orpo_lambda=0.3", "dpo.max_prompt_length=7"]).config
    assert (config.rl_num_generations, config.rl_grpo_beta, config.rl_epsilon_high) == (4, 0, -1)
    assert (config.dpo_algo, config.dpo_beta, config.dpo_orpo_lambda) == ("orpo", 0.2, 0.3)
    assert config.dpo_max_prompt_length == 7
    write("my.yml", "base_config: base.yml\nrl:\n  num_iterations: 2\n  epsilon_high: null\n  max_concurrency: 256\n")
    assert load(["my.yml"]).config.rl_num_iterations == 2
