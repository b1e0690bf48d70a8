"""What the first stage knows about a family."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.errors import UserError
from trainer.config.family import Facts, facts_of, families, lacks, reads
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import TRAIN, convert
from trainer.models.families import family

OWN = """
from trainer.config.family import Facts

def problem(config):
    return "this family has windows" if config.attention_type == "global" else None

FACTS = Facts(
    "trainer.models.llama2.family:FAMILY",
    reads=("fused_qkv",),
    ignores={"has no RoPE": ("rope_max_timescale",)},
    checks=((("attention_type",), problem),),
)
"""
BLOCK = "a_family.facts:FACTS"
WORDS = ["base.yml", "dataset_type=synthetic", f"decoder_block={BLOCK}"]


@pytest.fixture(autouse=True)
def own_family(tmp_path, monkeypatch) -> Path:
    """A package `a_family` with facts, which nothing has imported yet."""
    folder = tmp_path / "a_family"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "facts.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "a_family"]:
        del sys.modules[name]


def test_the_facts_of_all_families_load_no_jax():
    code = "import sys; from trainer.config.family import Config, families, facts_of\n"
    code += "assert all(facts_of(Config({'decoder_block': name})) for name in families()); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize("name", families())
def test_the_facts_name_the_rest_of_the_family(name):
    assert family(name).hugging_face or family(name).maxtext


def test_facts_by_import_path_are_those_of_a_family_of_the_trainer():
    with pytest.raises(UserError, match="this family has windows"):
        load(WORDS)
    loaded = load([*WORDS, "attention_type=local_sliding", "sliding_window_size=8", "rope_max_timescale=7"])
    assert [line for line in loaded.warnings if "has no RoPE" in line]
    config = loaded.config
    assert reads(config, "fused_qkv")
    assert lacks(config, "num_experts")
    assert family(config.decoder_block) is family("llama2")
    with pytest.raises(UserError, match="this family has no experts"):
        load([*WORDS, "attention_type=local_sliding", "num_experts=4"])


def test_a_checkpoint_does_not_import_facts():
    config = load(WORDS, imports=False).config
    assert facts_of(config) is None
    assert "a_family.facts" not in sys.modules


def test_a_yml_of_a_folder_does_not_import_facts(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints" / "0").mkdir(parents=True)
    (run / "config.yml").write_text(f"base_config: base.yml\ndecoder_block: {BLOCK}\n")
    with pytest.raises(UserError, match="code that a folder names runs only if you also name it"):
        load([str(run / "config.yml"), "dataset_type=synthetic", f"load_parameters_path={run}"])
    assert "a_family" not in sys.modules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FACTS = 1", "this is not a trainer.config.family.Facts"),
        ("import nothing_there", "there is no module nothing_there, which a_family.facts imports"),
        ("1 / 0", "importing a_family.facts fails: ZeroDivisionError"),
        ("FACT = 1", "a_family.facts has no FACTS; nearest: FACT"),
        (OWN.replace('"fused_qkv"', '"fused_kqv"'), "Facts.reads: fused_kqv is not one of num_experts"),
        (OWN.replace('("fused_qkv",)', '"fused_qkv"'), r"Facts.reads: write \('fused_qkv',\), with a comma"),
        (OWN.replace('("rope_max_timescale",)', '"rope_type"'), r"'has no RoPE'\]: write \('rope_type',\)"),
        (
            OWN.replace("rope_max_timescale", "rope_max_timescales"),
            "there is no key rope_max_timescales; nearest: rope",
        ),
        (OWN.replace('("attention_type",)', '("attention_typ",)'), "there is no key attention_typ; nearest: attention"),
        (OWN.replace("checks=", 'tensors=lambda config: {"w": ("embd",)}, checks='), "axis embd is not known"),
    ],
)
def test_facts_that_cannot_be_read_are_an_error_of_the_first_stage(own_family, text, message):
    (own_family / "facts.py").write_text(text)
    with pytest.raises(UserError, match=message):
        load(WORDS)


def test_they_are_reported_with_the_other_mistakes(own_family):
    (own_family / "facts.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"no key learing_rate(.|\n)*importing a_family.facts fails"):
        load([*WORDS, "learing_rate=1"])


def test_a_command_that_is_only_translated_does_not_import_facts():
    convert(parse([f"python -m MaxText.train base.yml decoder_block={BLOCK}"]), TRAIN)
    assert "a_family" not in sys.modules


def test_unknown_families_may_read_everything():
    config = Config({"decoder_block": "a_family.model:FAMILY"})
    assert facts_of(config) is None
    assert not reads(config, "num_experts")
    assert not lacks(config, "num_experts")
    assert isinstance(facts_of(Config({"decoder_block": "llama2"})), Facts)
