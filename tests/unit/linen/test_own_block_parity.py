"""`trainer.parity` on a team's hand-written Linen block and the NNX block that will replace it."""

import json
from pathlib import Path

import pytest
from compiler import exact
from parity_cases import run

pytestmark = pytest.mark.rest(covered_by="the block in a plain stack, in unit/linen/test_own_block.py")

LEFT = ("left=linen", "left.decoder_block=team_block:LinenBlock", "right=nnx", "--json")


@pytest.fixture
def team_block(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "guides"))
    import team_block

    return team_block


@exact()
def test_they_are_equal_under_the_names_that_the_author_gives(capsys, team_block):
    code, out, _ = run(capsys, *LEFT, "right.decoder_block=team_block:NNXBlock")
    (comparison,) = json.loads(out)["comparisons"]
    assert (code, comparison["bits"]) == (0, True)
    parameters = {it["name"] for it in comparison["quantities"]["parameters"]["arrays"]}
    assert parameters > {f"decoder/layers/{its}/bias" for its in team_block.NNXBlock.PARAMETER_NAMES.values()}


def test_a_bug_is_found(capsys, team_block, monkeypatch):
    class Wrong(team_block.NNXBlock):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.mlp_norm.epsilon = 1e-3

    monkeypatch.setattr(team_block, "Wrong", Wrong, raising=False)
    code, out, _ = run(capsys, *LEFT, "right.decoder_block=team_block:Wrong", only_forward=True)
    (comparison,) = json.loads(out)["comparisons"]
    assert (code, comparison["first"]) == (1, "activations: decoder/layers/output, layer 0")
    assert comparison["quantities"]["parameters"]["bits"]


def test_a_name_that_the_block_does_not_have_is_refused(capsys, team_block, monkeypatch):
    class Misnamed(team_block.NNXBlock):
        PARAMETER_NAMES = team_block.NNXBlock.PARAMETER_NAMES | {"qvk": "c_attn"}

    monkeypatch.setattr(team_block, "Misnamed", Misnamed, raising=False)
    code, _, err = run(capsys, *LEFT, "right.decoder_block=team_block:Misnamed")
    assert code == 2
    assert "team_block:Misnamed names decoder/layers/qvk, but the block has no such parameter" in err
