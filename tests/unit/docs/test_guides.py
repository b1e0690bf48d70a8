"""The Python in the guides runs, block after block, as a reader would type it."""

import builtins
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from trainer.models.families import family
from trainer.weights.huggingface.merged import whole_shapes

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


# A block of Python and, if the guide shows how it fails, the last lines of the traceback; ... stands for left-out text.
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```text\n(\w+(?:Error|Exception): .*?)\n```\n)?", re.MULTILINE | re.DOTALL
)


def run(name):
    blocks = BLOCK.findall((GUIDES / name).read_text())
    assert blocks
    names = {"__name__": name}
    for code, failure in blocks:
        if not failure:
            exec(code, names)
            continue
        kind, _, message = failure.partition(": ")
        with pytest.raises(getattr(builtins, kind)) as caught:
            exec(code, names)
        assert re.match(".*".join(map(re.escape, message.split("..."))), str(caught.value), re.DOTALL), caught.value
    return names


def test_a_failure_that_does_not_come_as_shown_is_found(monkeypatch, tmp_path):
    def guide(code, shown):
        (tmp_path / "guide.md").write_text(f"```python\n{code}\n```\n\n```text\n{shown}\n```\n")
        run("guide.md")

    monkeypatch.setattr(sys.modules[__name__], "GUIDES", tmp_path)
    guide("[][1]", "IndexError: list index...range")
    guide("x = 1", "what it gives")  # the guide shows no failure
    for code, shown in (("[][1]", "IndexError: another"), ("[][1]", "KeyError: list index"), ("x = 1", "KeyError: x")):
        with pytest.raises((AssertionError, IndexError, pytest.fail.Exception)):
            guide(code, shown)


@pytest.mark.default_combination
def test_the_guide_to_the_trees_beside_a_state():
    names = run("state-sharding.md")
    count = names["state_to_sharded_layout"](3.0, jnp.ones((2, 6)), 10.0)
    assert (count.shape, count.dtype, count[0]) == ((1,), jnp.float32, 2)


def test_the_guide_to_sharding():
    names = run("sharding.md")
    assert names["y"].shape == (8, 4)
    assert len(names["y"].sharding.device_set) == jax.device_count() == 8


def test_the_guide_to_migration_names_where_the_train_state_is_imported():
    lines = re.findall(r"^from trainer\..* import .*$", (GUIDES / "migrating.md").read_text(), re.MULTILINE)
    names = {}
    exec("\n".join(lines), names)
    assert issubclass(names["TrainStateNNX"], nnx.Module)
    assert callable(names["init_state_fn"])


@pytest.mark.default_combination
def test_the_guide_to_optimizers():
    run("optimizers.md")


def test_every_page_that_base_yml_names_exists():
    root = GUIDES.parents[1]
    pages = re.findall(r"docs/[\w/.-]+\.md", (root / "base.yml").read_text(encoding="utf-8"))
    assert pages
    assert not [page for page in pages if not (root / page).is_file()]


def test_the_table_of_features_names_files_that_exist():
    root = GUIDES.parents[1]
    page = (root / "docs/architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.(?:py|yml))`", page.partition("## Where a feature is")[2])
    assert len(files) > 60
    assert [file for file in files if not (root / "src/trainer" / file).is_file()] == []


def test_the_guide_to_merged_matrices():
    declared = run("extending.md")["PHI"]
    (own,) = family("phi3").hugging_face
    assert (declared.merged, declared.layouts) == (own.merged, own.layouts)
    parts = {"a.mlp.gate_proj.weight": (6, 4), "a.mlp.up_proj.weight": (6, 4)}
    assert whole_shapes(parts, declared.merged) == {"a.mlp.gate_up_proj.weight": (12, 4)}
