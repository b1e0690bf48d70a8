"""The flags while Linen exists: which changes they allow, and the notices about Linen."""

import pytest
from support import ALL_COMBINATIONS, arguments, pinned, tiny_config

from trainer.config.errors import UserError
from trainer.config.flags import COMBINATIONS, FLAGS, combination
from trainer.config.load import load
from trainer.config.resume import check_resume

pytestmark = pytest.mark.default_combination  # tests the table itself


@pytest.mark.parametrize(
    ("flags", "ways"),
    [
        ("enable_nnx=false", {"nnx": "enable_nnx=true", "linen": "pure_nnx_decoder=false pure_nnx=false"}),
        ("enable_nnx=false pure_nnx=false", {"bridged": "enable_nnx=true", "linen": "pure_nnx_decoder=false"}),
        (
            "enable_nnx=false pure_nnx_decoder=false",
            {"nnx_linen_decoder": "enable_nnx=true", "linen": "pure_nnx=false"},
        ),
    ],
)
def test_the_message_names_the_flag_to_change_and_the_change_helps(flags, ways):
    with pytest.raises(UserError) as caught:
        load(flags.split())
    for name, changes in ways.items():
        assert f"set {changes} (combination {name})" in str(caught.value)
        assert combination(load([*flags.split(), *changes.split()]).config) == name


def test_five_of_the_eight_settings_are_combinations():
    assert len(set(COMBINATIONS.values())) == 5


@pytest.mark.parametrize("name", [name for name in ALL_COMBINATIONS if name != "nnx"])
def test_a_part_in_linen_is_said_to_go(name):
    (note,) = load(arguments(name)).notes
    assert (
        note == f"combination {name}: the Linen paths will be removed; to migrate to nnx, see docs/guides/migrating.md"
    )
    assert load(arguments("nnx")).notes == []


@pytest.mark.parametrize("name", ALL_COMBINATIONS)
def test_the_flags_may_change_when_a_run_goes_on(name):
    saved = tiny_config("nnx").to_dict()
    assert check_resume(saved, tiny_config(name), False, "there") == []
    assert [saved[flag] for flag in FLAGS] != list(pinned(name).values()) or name == "nnx"
