"""trainer.parity as a user runs it: what is equal, where a planted difference is found, mistakes."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import ALL_COMBINATIONS, TINY, pinned

from trainer import parity
from trainer.compare import programs
from trainer.models import llama2, mistral

# Few leaves compile in little time.
SMALL = TINY | {"opt_type": "sgd", "gradient_clipping_threshold": 0, "per_device_batch_size": 8}
SMALL |= {"base_num_decoder_layers": 3, "base_num_query_heads": 2, "base_num_kv_heads": 2}
QUANTITIES = ["parameters", "activations", "loss", "gradients", "updated parameters", "optimizer state"]


@pytest.fixture(autouse=True)
def _compiles_fast():
    """What is compared here is compiled alike on both sides, so it may be compiled without optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def only_forward(monkeypatch):
    """Leaves out the gradients and the update, where the forward pass shows what the test is about."""
    return lambda: monkeypatch.setattr(programs, "MEASURES", programs.MEASURES[:2])


def run(capsys, *words, combination="nnx", **keys):
    """The exit code, stdout and stderr of the command."""
    settings = SMALL | pinned(combination) | keys
    code = 0
    try:
        parity.main(["base.yml", *(f"{key}={value}" for key, value in settings.items()), *words])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_all_combinations_are_equal_in_every_bit(capsys):
    one, *others = ALL_COMBINATIONS
    code, out, _ = run(capsys, f"left={one}", f"right={','.join(others)}", "--json")
    report = json.loads(out)
    assert (code, report["equal"], report["left"]) == (0, True, one)
    assert [it["right"] for it in report["comparisons"]] == others
    for comparison in report["comparisons"]:
        assert comparison["bits"]
        assert list(comparison["quantities"]) == QUANTITIES
        activations = comparison["quantities"]["activations"]["arrays"]
        assert [(it["name"], it["layer"]) for it in activations] == [
            ("embedding", None),
            *((f"decoder/layers/{name}", i) for i in range(3) for name in ("attention_output", "mlp_output", "output")),
            ("final_norm", None),
            ("logits", None),
        ]
        assert comparison["facts"]["program text"].startswith("the same text")
        assert comparison["facts"]["FLOPs"][0] == comparison["facts"]["FLOPs"][1] > 0
        assert comparison["facts"]["memory: temporaries"][0] == comparison["facts"]["memory: temporaries"][1] > 0


def test_a_planted_difference_is_found_in_its_layer(capsys, monkeypatch, only_forward):
    only_forward()
    layers = itertools.cycle(range(3))

    class Wrong(llama2.Block):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.mlp = WrongMLP(
                16, 32, config.mlp_activations, dtype=jnp.float32, weight_dtype=jnp.float32, rngs=rngs, dropout_rate=0.0
            )

    class WrongMLP(llama2.MLP):
        def __call__(self, *args):
            # Unrolled, a block is traced once for every layer.
            return super().__call__(*args) * (1.001 if next(layers) == 1 else 1.0)

    monkeypatch.setattr(mistral, "Block", Wrong)
    code, out, _ = run(capsys, "right.decoder_block=mistral", scan_layers=False)
    lines = out.splitlines()
    assert code == 1
    assert lines[-1] == "left and right part first in activations: decoder/layers/mlp_output, layer 1"
    rows = {line.split("  ")[0] or line.strip().split("  ")[0]: line.split() for line in lines}
    assert rows["parameters"][2:] == ["equal", "bits"]
    assert rows["layer 0"][3:] == ["equal", "bits"]
    assert rows["layer 1"][3] == "apart"
    assert rows["layer 1"][-1] == "mlp_output"
    assert rows["layer 2"][3] == "apart"


def test_a_team_s_linen_block_against_its_nnx_counterpart(capsys, monkeypatch, only_forward):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "guides"))
    import team_block

    class Wrong(team_block.NNXBlock):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.mlp_norm.epsilon = 1e-3

    monkeypatch.setattr(team_block, "Wrong", Wrong, raising=False)
    linen = ("left=linen", "left.decoder_block=team_block:LinenBlock", "right=nnx", "--json")
    code, out, _ = run(capsys, *linen, "right.decoder_block=team_block:NNXBlock")
    (comparison,) = json.loads(out)["comparisons"]
    assert (code, comparison["bits"]) == (0, True)
    parameters = {it["name"] for it in comparison["quantities"]["parameters"]["arrays"]}
    assert "decoder/layers/c_attn/kernel" in parameters

    only_forward()
    code, out, _ = run(capsys, *linen, "right.decoder_block=team_block:Wrong")
    (comparison,) = json.loads(out)["comparisons"]
    assert (code, comparison["first"]) == (1, "activations: decoder/layers/output, layer 0")
    assert comparison["quantities"]["parameters"]["bits"]


def test_another_mesh_on_devices_of_its_own_number(capsys):
    meshes = (
        "left.ici_fsdp_parallelism=1",
        "left.per_device_batch_size=8",
        "right.ici_fsdp_parallelism=4",
        "right.ici_tensor_parallelism=2",
        "right.per_device_batch_size=1",
    )
    code, out, _ = run(capsys, *meshes, "rtol=1e-4")
    assert code == 0
    assert "1 x cpu, 1 process | 8 x cpu, 1 process" in out
    assert out.splitlines()[-1] == "left and right are equal within rtol=0.0001"
    code, _, err = run(capsys, *meshes[:4])
    assert code == 2
    assert "left has 8 rows in its batch and right has 64" in err
    assert "nearest for right: per_device_batch_size=1" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare"),
        (["left=nnx", "rtol=-1"], "rtol=-1: a number"),
        (["left.data_shuffle_seed=1"], "data_shuffle_seed: not the same in left and right"),
        (["left.attention=blokwise"], "nearest: blockwise"),
        (["right.ici_tensor_parallelism=3"], "right: 1 mistake in the configuration:\n  data 1 x tensor 3 = 3"),
    ],
)
def test_mistakes_end_with_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_help_needs_no_jax(capsys):
    parity.main(["--help"])
    assert "left.KEY=VALUE" in capsys.readouterr().out
