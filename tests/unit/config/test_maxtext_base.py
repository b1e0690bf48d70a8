"""MaxText's own base.yml as the base of a configuration."""

import pytest
import yaml
from config_cases import mistakes, notes, their_base, write

from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.config.schema import schema
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import TRAIN, convert


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", ["src/maxtext/configs/base.yml", "MaxText/configs/base.yml", "theirs.yml"])
def test_their_base_is_recognized_by_what_it_holds(path, tmp_path):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    write(path, their_base())
    loaded = load([path, "dataset_type=synthetic", "steps=10"])
    assert loaded.config.to_dict() == load(["dataset_type=synthetic", "steps=10"]).config.to_dict()
    assert loaded.warnings == []
    first, *differing, last = notes(path, "dataset_type=synthetic", "steps=10")
    assert first.startswith(f"{path} is MaxText's base.yml: ")
    assert "its logical_axis_rules, " in first
    assert first.endswith("mesh_axes, data_sharding are ignored")
    note = "\n".join(differing)
    for listed in ("base_emb_dim=192 (2048)", 'dtype="auto" ("bfloat16")', "max_target_length=128 (2048)"):
        assert listed in note
    assert " steps=" not in note
    assert "dataset_type=" not in note
    assert f"maxtext.yml instead of {path}" in last


@pytest.mark.parametrize("kind", ["a copy of ours", "a part"])
def test_a_file_that_is_not_their_base_counts_in_full(kind):
    """Its values do not count as defaults, no matter which MaxText keys it contains."""
    neutral = {name: it.neutral[0] for name, it in verdicts.verdicts().items() if it.neutral and "." not in name}
    theirs = dict(list(neutral.items())[:15]) | {"learning_rate": 3e-5, "base_emb_dim": 2048, "steps": 77}
    ours = {name: key.default for name, key in schema().keys.items()} if kind == "a copy of ours" else {}
    write("mine.yml", yaml.safe_dump(ours | theirs))
    if kind == "a part":
        (line,) = mistakes("mine.yml")
        assert line.startswith("mine.yml: no base_config, and keys are missing")
    else:
        config = load(["mine.yml"]).config
        assert (config.base_emb_dim, config.learning_rate, config.steps) == (2048, 3e-5, 77)


def test_what_a_person_changed_in_their_base_counts():
    write("theirs.yml", their_base(base_emb_dim=64, learning_rate=1e-3, scan_layers=False, use_iota_embed=True))
    loaded = load(["theirs.yml", "model_name=llama2-7b"])
    assert (loaded.config.base_emb_dim, loaded.config.learning_rate, loaded.config.scan_layers) == (64, 1e-3, False)
    assert loaded.config.base_mlp_dim == 11008  # from the preset
    assert set(loaded.changed) == {"base_emb_dim", "learning_rate", "scan_layers", "model_name"}


def test_a_key_without_a_value_has_their_default():
    """In their base.yml, in a child of it, and on a command line: wherever MaxText accepts null or none."""
    write("theirs.yml", their_base())
    write("child.yml", "base_config: theirs.yml\nfinal_logits_soft_cap: ~\nmetrics_file: null\nsteps: 3\n")
    loaded = load(["child.yml", "num_diloco_fragments=", "attn_logits_soft_cap=None", "remat_policy=null"])
    config = loaded.config
    assert (config.final_logits_soft_cap, config.attn_logits_soft_cap, config.num_diloco_fragments) == (0.0, 0.0, 1)
    assert (config.metrics_file, config.hf_name, config.steps) == ("", "", 3)
    assert config.remat_policy == "full", "without a policy MaxText recomputes everything"
    assert load(["remat_policy=none"]).config.remat_policy == "none", "a choice of this trainer"
    assert load(["tokenizer_path=~"]).config.tokenizer_path == "~", "the home folder"
    for word in ("steps=", "steps=null", "learning_rate=none", "base_num_kv_heads="):  # MaxText refuses these, too
        (line,) = mistakes(word)
        assert "not an integer" in line or "not a number" in line


def test_a_feature_turned_on_in_their_base_is_an_error_with_its_line():
    write("theirs.yml", their_base(first_num_hash_layers=2, dataset_path="DATA", save_period=30))
    lines = mistakes("theirs.yml")
    assert len(lines) == 3
    assert all("(theirs.yml:" in line for line in lines)


def test_a_data_path_for_their_base_needs_a_dataset_type():
    write("theirs.yml", their_base())
    (line,) = mistakes("theirs.yml", "dataset_path=DATA")
    assert "(the line in theirs.yml counts as a default)" in line
    assert "add dataset_type=tfds dataset_name=c4/en:3.0.1 on the command line" in line


def test_an_older_base_is_at_its_own_defaults():
    older = {"enable_nnx": False, "collect_stack_trace": True, "tokenizer_path": "assets/tokenizer.llama2"}
    keys = yaml.safe_load(their_base(**older))
    del keys["kv_proj"]
    keys.pop("generate_padding_batch_eval", None)
    write("theirs.yml", yaml.safe_dump(keys))
    assert load(["theirs.yml"]).changed == {}


def test_keys_of_a_later_version_are_one_warning():
    write("theirs.yml", their_base(**{f"newer_{i}": i for i in range(20)}))
    (line,) = load(["theirs.yml"]).warnings
    assert "newer_0, newer_1" in line
    assert line.endswith("and 12 more")


def test_a_child_of_their_base_finds_it_beside_itself_or_in_their_configs_folder(tmp_path):
    (tmp_path / "maxtext/configs/gpu/models").mkdir(parents=True)
    write("maxtext/configs/base.yml", their_base(learning_rate=1e-3))
    write("maxtext/configs/sft.yml", "base_config: base.yml\nsteps: 3\nlora: {enable_lora: false}\n")
    write(
        "maxtext/configs/gpu/models/m.yml", 'base_config: "base.yml"\nsteps: 3\nhardware: gpu\nuse_iota_embed: true\n'
    )
    for child in ("maxtext/configs/sft.yml", "maxtext/configs/gpu/models/m.yml"):
        loaded = load([child])
        assert (loaded.config.steps, loaded.config.learning_rate) == (3, 1e-3)
        assert "is MaxText's base.yml" in loaded.notes[0]


def test_a_preset_file_of_theirs_says_how_presets_are_chosen():
    write("llama2-7b.yml", "base_emb_dim: 4096\nhead_dim: 128\n")
    (line,) = mistakes("llama2-7b.yml")
    assert "or model_name=llama2-7b for the preset of that name" in line


@pytest.mark.parametrize(
    "path", ["src/maxtext/configs/base.yml", "src/MaxText/configs/base.yml", "/deps/MaxText/configs/base.yml"]
)
def test_a_path_of_theirs_that_is_not_there_is_the_packed_base(path):
    loaded = load([path])
    assert loaded.changed == {}
    assert loaded.notes[0] == f"{path} does not exist here: using the packaged base.yml"
    assert "base_emb_dim=192 (2048)" in loaded.notes[1]


def test_a_command_with_their_base_is_converted_to_their_defaults():
    """Values that the user changed are not silently dropped."""
    write("theirs.yml", their_base())
    made = convert(parse(["python3 -m MaxText.train theirs.yml dataset_type=synthetic"]), TRAIN)
    assert made.runs
    assert made.words[3] == "maxtext.yml"
    write("theirs.yml", their_base(steps=7))
    made = convert(parse(["python3 -m MaxText.train theirs.yml dataset_type=synthetic"]), TRAIN)
    assert not made.runs
    assert "maxtext.yml" in made.problems[0]
