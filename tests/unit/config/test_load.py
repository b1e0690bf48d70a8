"""Stage 1: precedence, how files are found, and how errors are reported."""

import pytest

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.schema import BASE_YML, schema


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in its own folder, to which `write` writes files."""
    monkeypatch.chdir(tmp_path)


def write(name: str, text: str) -> str:
    with open(name, "w") as file:
        file.write(text)
    return name


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv)
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in the configuration:"
    return lines


@pytest.mark.default_combination
@pytest.mark.parametrize("argv", [[], ["base.yml"], ["src/maxtext/configs/base.yml"]])
def test_the_packed_base_yml_needs_no_file(argv):
    loaded = load(argv)
    assert loaded.config.to_dict() == {name: key.default for name, key in schema().keys.items()}
    assert loaded.changed == {}
    assert loaded.warnings == []
    assert bool(loaded.notes) == ("/" in "".join(argv))


def test_loading_twice_shares_nothing():
    load([]).config.logical_axis_rules[0][1].append("tensor")
    assert load([]).config.logical_axis_rules[0] == [
        "activation_batch",
        ["stage", "data", "fsdp", "fsdp_transpose", "expert"],
    ]


def test_precedence_is_base_preset_yml_command_line():
    write("parent.yml", "base_config: base.yml\nmodel_name: llama2-7b\nsteps: 1\nhead_dim: 64\nvocab_size: 900\n")
    write("my.yml", "base_config: parent.yml\nsteps: 2\nbase_mlp_dim: 300\n")
    loaded = load(["my.yml", "vocab_size=901"])
    config = loaded.config
    assert config.base_emb_dim == 4096  # the preset overrides base.yml
    assert (config.head_dim, config.base_mlp_dim) == (64, 300)  # the yml and its parent override the preset
    assert config.steps == 2  # the yml overrides its parent
    assert config.vocab_size == 901  # the command line overrides all
    assert loaded.changed["vocab_size"] == "command line"
    assert loaded.changed["steps"] == "my.yml:2"
    assert loaded.changed["head_dim"] == "parent.yml:4"
    assert "base_emb_dim" not in loaded.changed


def test_the_command_line_beats_the_preset_without_further_ado():
    assert load(["model_name=llama2-7b", "base_emb_dim=64"]).config.base_emb_dim == 64


@pytest.mark.default_combination
def test_the_start_says_which_keys_of_the_preset_were_changed():
    write("my.yml", "base_config: base.yml\nmodel_name: llama2-7b\nremat_policy: minimal\nhead_dim: 128\n")
    words = ["base_num_decoder_layers=4", "vocab_size=32000", "mlp_activations=gelu", "steps=3"]
    notes = load(["my.yml", *words]).notes
    others = "the defaults that apply differ from MaxText's (docs/from-maxtext.md)"
    assert f"{others}; for MaxText's, set base_config: maxtext.yml in my.yml" in notes
    assert [note for note in notes if note.startswith("model_name=")] == [
        "model_name=llama2-7b: base_num_decoder_layers 32 -> 4 (command line)",
        'model_name=llama2-7b: mlp_activations ["silu", "linear"] -> ["gelu"] (command line)',
        'model_name=llama2-7b: remat_policy "full" -> "minimal" (my.yml:3)',
    ]


def test_a_key_given_twice_takes_the_last():
    write("my.yml", "base_config: base.yml\nsteps: 1\nsteps: 2\n")
    assert load(["my.yml"]).config.steps == 2
    assert load(["steps=1", "steps=2"]).config.steps == 2


def test_a_parent_is_found_relative_to_its_child(tmp_path):
    (tmp_path / "sub").mkdir()
    write("sub/parent.yml", "base_config: base.yml\nsteps: 5\n")
    write("sub/my.yml", "base_config: parent.yml\n")
    write("other.yml", "base_config: sub/my.yml\n")
    assert load(["other.yml"]).config.steps == 5


def test_a_base_yml_of_ones_own_may_have_the_packed_one_for_parent():
    write("base.yml", "base_config: base.yml\nsteps: 5\n")
    write("my.yml", "base_config: base.yml\neval_steps: 3\n")
    assert load(["base.yml"]).config.steps == 5
    assert load(["my.yml"]).config.steps == 5
    assert load([]).config.steps == 5


def test_a_full_copy_stands_below_the_preset_where_it_was_not_edited():
    width = schema().keys["base_mlp_dim"].default
    write("base.yml", BASE_YML.read_text().replace(f"base_mlp_dim: {width}", f"base_mlp_dim: {width + 8}"))
    loaded = load(["base.yml", "model_name=llama2-7b"])
    assert (loaded.config.base_emb_dim, loaded.config.base_mlp_dim) == (4096, width + 8)
    assert set(loaded.changed) == {"model_name", "base_mlp_dim"}


def test_any_name_and_a_path_with_an_equals_sign_will_do(tmp_path):
    (tmp_path / "lr=3").mkdir()
    write("lr=3/my.yml", "base_config: base.yml\nsteps: 5\n")
    write("conf", "base_config: base.yml\nsteps: 6\n")
    assert load(["lr=3/my.yml"]).config.steps == 5
    assert load(["conf"]).config.steps == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_config: gone.yml\n", "base_config=gone.yml (my.yml:1): there is no such file"),
        ("base_config: .\n", "base_config=. (my.yml:1): this is a folder; the packaged files are base.yml"),
        ("base_config: my.yml\n", "base_config=my.yml (my.yml:1)|its own parent"),
        (
            "steps: 5\n",
            "my.yml: no base_config, and keys are missing (run_name, base_output",
        ),
        ("", "my.yml: no base_config"),
        ("a: [1\n", "my.yml:2: not YAML"),
        ("- steps\n", "my.yml: not a mapping"),
        ("base_config: base.yml\nstepz: 5\n", "stepz=5 (my.yml:2): there is no key stepz; nearest: steps"),
        ("base_config: base.yml\nsteps: [1]\n", "steps=[1] (my.yml:2): a list instead of a single value"),
        ("base_config: base.yml\n? [a]\n: 1\n", "[a]=1 (my.yml:2): there is no key [a]"),
    ],
)
def test_mistakes_in_a_yml_name_file_and_line(text, message):
    write("my.yml", text)
    (line,) = mistakes("my.yml")
    assert all(part in line for part in message.split("|"))


@pytest.mark.parametrize("path", ["gone.yml", "other/base.yml", "src/maxtext/configs/sft.yml"])
def test_a_file_that_is_not_there(path):
    said = "there is no such file; the packaged files are base.yml and maxtext.yml"
    assert mistakes(path) == [f"{path} (command line): {said}"]


def test_a_folder_or_bytes_for_a_yml(tmp_path):
    (tmp_path / "dir.yml").mkdir()
    (tmp_path / "bytes.yml").write_bytes(b"steps: \xff")
    said = "this is a folder; the packaged files are base.yml and maxtext.yml"
    assert mistakes("dir.yml") == [f"dir.yml (command line): {said}"]
    assert mistakes("bytes.yml") == ["bytes.yml: not UTF-8 text"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("stepz=3", "stepz=3 (command line): there is no key stepz; nearest: steps"),
        ("learing_rate=3", "learing_rate=3 (command line): there is no key learing_rate; nearest: learning_rate"),
        ("num_steps=3", "num_steps=3 (command line): there is no key num_steps; nearest: steps"),
        (
            "device_batch_size=3",
            "device_batch_size=3 (command line): there is no key device_batch_size; nearest: per_device_",
        ),
        ("num_layers=3", "num_layers=3 (command line): there is no key num_layers; nearest: base_num_decoder_layers"),
        ("qqqqqq=3", "qqqqqq=3 (command line): there is no key qqqqqq"),
        ("base_embed_dim=3", "base_embed_dim=3 (command line): there is no key base_embed_dim; nearest: base_emb_dim"),
        ("steps=abc", "steps=abc (command line): not an integer; allowed: an integer in [1, 2147483647] or -1"),
        ("steps=0", "steps=0 (command line): out of range; allowed: an integer in [1, 2147483647] or -1"),
        ("adam_b1=1", "adam_b1=1 (command line): out of range; allowed: a number in [0, 1)"),
        ("scan_layers=x", "scan_layers=x (command line): not true or false; allowed: true or false"),
        (
            "opt_type=adamv",
            "opt_type=adamv (command line): not one of the choices; allowed: adamw, nadamw, ",
        ),
        ("dtype=float16", "dtype=float16 (command line): not one of the choices; allowed: auto, float32, bfloat16"),
        ("weight_dtype=float16", "weight_dtype=float16 (command line): not one of the choices; allowed: float32, bf"),
        ("mu_dtype=float16", 'mu_dtype=float16 (command line): not one of the choices; allowed: "", float32, bf'),
        ("init_weights_seed=-1", "init_weights_seed=-1 (command line): out of range"),
        ("init_weights_seed=4294967296", "init_weights_seed=4294967296 (command line): out of range"),
        ("data_shuffle_seed=4294967296", "data_shuffle_seed=4294967296 (command line): out of range"),
        ("--steps=3", "--steps=3 (command line): keys have no dashes; write steps=3"),
        ("--scan-layers", "--scan-layers (command line): keys have no dashes; write scan_layers=VALUE"),
        ("steps", "steps (command line): no value; write steps=VALUE"),
        ("stepz", "stepz (command line): not key=value; nearest: steps"),
        ("--verbose", "--verbose (command line): unknown option"),
        ("base_config=my.yml", "base_config=my.yml (command line): base_config belongs in a yml"),
        ("base_config: my.yml", "base_config: my.yml (command line): base_config belongs in a yml"),
        (
            "model_name=llama2-7",
            "model_name=llama2-7 (command line): there is no such preset; allowed: default, deepseek2-16b",
        ),
        ("model_name=gemma4-e2b", "model_name=gemma4-e2b (command line): not supported yet: the family gemma4"),
    ],
)
def test_mistakes_on_the_command_line(word, line):
    (found,) = mistakes("base.yml", word)
    assert found.startswith(line)


@pytest.mark.parametrize("seed", [0, 4294967295])
def test_seeds_are_those_of_32_bits(seed):
    config = load([f"init_weights_seed={seed}", f"data_shuffle_seed={seed}"]).config
    assert (config.init_weights_seed, config.data_shuffle_seed) == (seed, seed)


def test_all_mistakes_are_told_at_once_one_line_each():
    write("my.yml", "base_config: base.yml\nstepz: 5\nsteps: x\n")
    lines = mistakes("my.yml", "other.yml", "foo=1", "prompt=a\nb", "dtype=float8\nx", "head_dim=3", "adamw_mask=[")
    assert [line.split(" ")[0].split("=")[0] for line in lines] == [
        "stepz", "steps", "other.yml", "foo", "dtype", "adamw_mask", "head_dim",
    ]  # fmt: skip
    assert not any("\n" in line for line in lines)


def test_a_key_that_could_not_be_read_makes_no_contradiction():
    assert len(mistakes("base_num_query_heads=x", "base_num_kv_heads=4")) == 1


def test_rules_replace_those_of_their_name_at_every_level():
    write("parent.yml", "base_config: base.yml\nlogical_axis_rules:\n- [embed, []]\n- [norm, fsdp]\n")
    write("my.yml", "base_config: parent.yml\nlogical_axis_rules: [[norm, [data, fsdp]]]\n")
    rules = dict(load(["my.yml", "logical_axis_rules=[[mlp,null],[vocab,[tensor]]]"]).config.logical_axis_rules)
    assert rules["embed"] == []
    assert rules["norm"] == ["data", "fsdp"]
    assert rules["mlp"] == []
    assert rules["vocab"] == ["tensor"]
    assert rules["heads"] == ["tensor", "tensor_sequence"]
    assert list(rules) == [name for name, _ in schema().keys["logical_axis_rules"].default]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[embd,fsdp]]", "there is no logical axis embd; allowed: .*; nearest: embed"),
        ("[[embed,fsdb]]", "embed: there is no mesh axis fsdb; allowed: diloco, data, stage, fsdp, .*; nearest: fsdp"),
        ("[[embed,[fsdp,fsdp]]]", "embed: a mesh axis is listed twice"),
        ("[[embed,fsdp],[embed,data]]", "two rules for embed"),
        ("[embed,fsdp]", "'embed' is not a rule"),
        ("[[embed]]", "is not a rule"),
        ("[[embed,[[fsdp]]]]", "there is no mesh axis"),
        ("[[mlp,fsdp]]", r"embed and mlp of mlp/wi_0/kernel \[layers 2, embed 192, mlp 512\] both use mesh axis fsdp"),
        ("[[activation_length,fsdp]]", "activation_batch and activation_length of .* both use mesh axis fsdp"),
    ],
)
def test_rules_that_are_none(rules, message):
    with pytest.raises(UserError, match=message):
        load([f"logical_axis_rules={rules}"])


def test_every_preset_loads():
    from trainer.config.files import preset_names

    assert "llama2-7b" in preset_names()
    for name in preset_names():
        assert load([f"model_name={name}"]).config.model_name == name


@pytest.mark.parametrize(
    "words",
    [
        "run_name=r base_output_directory=o dataset_type=synthetic steps=10",
        "run_name=r dataset_type=synthetic per_device_batch_size=2 gradient_accumulation_steps=8 steps=10",
        "run_name=r dataset_type=synthetic enable_nnx=true pure_nnx_decoder=true pure_nnx=true steps=10",
        "dataset_type=synthetic enable_checkpointing=False eval_interval=5 eval_steps=2 steps=10",
    ],
)
def test_command_lines_of_maxtext(words):
    assert load(["base.yml", *words.split()]).config.steps == 10
