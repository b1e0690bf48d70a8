"""What a record stores about the recorded side."""

from types import SimpleNamespace

import pytest
from support import arguments

from trainer.compare.measure import Snapshot
from trainer.compare.record import Record, Writer, _given
from trainer.config.load import load
from trainer.config.sides import Side


@pytest.mark.parametrize("given", [{}, {"dtype": "auto"}, {"dtype": "float32"}])
def test_the_dtype_is_the_one_that_was_computed_with(given, tmp_path):
    """On another platform, `auto` may select another dtype."""
    config = load(arguments("nnx", **given))
    left = SimpleNamespace(config=SimpleNamespace(dtype="bfloat16"), rows=1, microbatch=1, head={}, axes={}, batch={})
    left.snapshot = Snapshot({}, None)
    with Writer(tmp_path / "a.safetensors", (), arrays=False) as writer:
        writer.begin(left, Side("left", (), config))
    found = Record(tmp_path / "a.safetensors")
    assert (found.given["dtype"], found.reference().config.dtype) == ("bfloat16", "bfloat16")


def test_a_default_that_a_yml_of_maxtext_changes_is_given():
    """MaxText's defaults are not on the command line."""
    loaded = SimpleNamespace(config=load(["base.yml", "learning_rate=0.5"]).config, changed={"steps": "command line"})
    assert _given(loaded) == {"learning_rate", "steps"}
