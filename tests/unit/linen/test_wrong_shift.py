"""`trainer.parity` finds a wrong shift in one combination's multi-token-prediction modules."""

import json

import jax.numpy as jnp
from parity_cases import run as parity

from trainer.linen import mtp


def test_parity_names_a_wrong_shift_in_a_module(capsys, monkeypatch):
    run_mtp = mtp.run_mtp

    def wrong(config, part, run_block, x_kbte, *args):
        return run_mtp(config, part, run_block, jnp.roll(x_kbte, -1, axis=2), *args)

    monkeypatch.setattr(mtp, "run_mtp", wrong)
    code, out, _ = parity(capsys, "left=nnx", "right=linen", "--json", only_forward=True, mtp_num_layers=1)
    (faulty,) = json.loads(out)["comparisons"]
    assert code == 1
    assert faulty["first"] == "activations: mtp_block/mtp_layer_1/mtp_1_projection"
    equal = {it["name"] for it in faulty["quantities"]["activations"]["arrays"] if it["bits"]}
    assert {"embedding", "final_norm", "logits"} <= equal
