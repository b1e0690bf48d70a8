"""Defaults of runs that start from a model."""

import pytest
import yaml

from trainer.config.capabilities.chat_keys import SFT_DEFAULTS
from trainer.config.capabilities.preference_keys import DPO_DEFAULTS
from trainer.config.capabilities.rl_keys import RL_DEFAULTS
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.from_model import taken_from_model
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.config.resume import another_update, check_resume

MODEL, LORA = "load_parameters_path=/models/m", "enable_lora=true lora_rank=2 lora_alpha=2"
GRPO = RL_DEFAULTS | {"reward_functions": ["m:f"]}


def loaded(words="", defaults=None):
    data = ["dataset_type=grain", "grain_file_type=jsonl", "grain_train_files=a"]
    return load([*data, *words.split()], defaults=defaults)


@pytest.mark.parametrize(
    ("command", "defaults", "rate"),
    [("train", {}, 2e-5), ("sft", SFT_DEFAULTS, 2e-5), ("dpo", DPO_DEFAULTS, 5e-7), ("grpo", GRPO, 1e-6)],
)
def test_a_run_that_starts_from_a_model_has_its_programs_learning_rate(command, defaults, rate):
    assert loaded(defaults=defaults).config.learning_rate == 6e-3  # from scratch
    made = loaded(MODEL, defaults)
    assert made.config.learning_rate == rate
    assert made.config.warmup_steps_fraction == 0.1
    source = f"default of trainer.{command} for a run that starts from a model"
    assert made.sources["learning_rate"] == source
    line = taken_from_model(made.config, made.sources)
    assert line.startswith(f"learning_rate={rate:.1e} warmup_steps_fraction=0.1 ({source}")
    assert loaded(f"{MODEL} {LORA}", defaults).config.learning_rate == pytest.approx(10 * rate, rel=1e-12)


def test_everything_that_gives_the_key_wins(tmp_path):
    (tmp_path / "own.yml").write_text("base_config: base.yml\nlearning_rate: 0.1\n")
    for words, rate in ((f"{tmp_path}/own.yml", 0.1), ("learning_rate=0.2", 0.2), ("learning_rate=0.006", 6e-3)):
        made = load([*words.split(), *MODEL.split()])
        assert made.config.learning_rate == rate
        assert taken_from_model(made.config, made.sources) == ""


def test_a_run_that_continues_from_a_whole_state():
    """Training that began from scratch continues with its learning rate, fine-tuning with the fine-tuning rate."""
    assert loaded("load_full_state_path=/runs/a").config.learning_rate == 6e-3
    assert loaded("load_full_state_path=/runs/a", SFT_DEFAULTS).config.learning_rate == 2e-5


def test_a_run_that_trained_with_the_default_of_before_is_told():
    now = resolve(loaded(MODEL).config, device_count=1, platform="cpu")
    before = yaml.safe_load(to_yaml(now)) | {"learning_rate": 6e-3}
    with pytest.raises(UserError, match=r"learning_rate: 0.006 -> 2.0e-05"):
        check_resume(before, now, False, "runs/a")
    assert another_update(before, now).endswith("(old -> new): learning_rate: 0.006 -> 2.0e-05")
    assert another_update(yaml.safe_load(to_yaml(now)), now) == ""
