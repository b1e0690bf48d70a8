"""A Linen block that declares which weights QK-Clip scales."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from support import arguments, packed_batch

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.ops.attention import Mask
from trainer.ops.max_logits import max_logits
from trainer.training.batches import placed
from trainer.training.build import build

KEYS = {
    "use_qk_clip": True,
    "qk_clip_threshold": 0.01,
    "opt_type": "sgd",
    "learning_rate": 0,
    "gradient_clipping_threshold": 0,
    "decoder_block": "own:Block",
}


class Silent(linen.Module):
    """Has the queries and keys of all heads in one kernel."""

    config: object

    @property
    def heads(self):
        return self.config.base_num_query_heads

    @linen.compact
    def __call__(self, x, cache, context):
        shape = (*x.shape[:2], self.heads, self.config.head_dim)
        both = linen.Dense(2 * self.heads * self.config.head_dim, name="qk")(x)
        q, k = (part.reshape(shape) for part in jnp.split(both, 2, axis=-1))
        mask = Mask(context.positions, context.positions, context.segments, context.segments)
        self.sow("MaxLogit", "max_logit", max_logits(q, k, mask))
        return x + both.mean(), cache


class Stating(Silent):
    def logit_factors(self, eta_h):
        return {"qk": jnp.sqrt(jnp.tile(jnp.repeat(eta_h, self.config.head_dim), 2))}


@pytest.mark.parametrize(("scan_layers", "mtp_num_layers"), [(True, 0), (False, 1)])
def test_its_heads_come_down_to_the_threshold(scan_layers, mtp_num_layers, monkeypatch):
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Block=Stating))
    run = build(
        load(arguments("linen", **KEYS, scan_layers=scan_layers, mtp_num_layers=mtp_num_layers)).config,
        jax.devices()[:1],
    )
    step = run.compile()
    batch = packed_batch(run.config, run.rows)
    state, first = step(run.init(), placed(run, batch), ())
    for _ in range(1 + mtp_num_layers):
        state, _ = step(state, placed(run, batch), ())
    _, last = step(state, placed(run, batch), ())
    assert first["clipped_heads"] == 4 * (2 + mtp_num_layers)
    assert first["max_logit"] > 1
    np.testing.assert_allclose(last["max_logit"], 0.01, rtol=1e-3)


def test_a_block_that_states_none_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Block=Silent))
    with pytest.raises(UserError, match="Silent of decoder_block=own:Block has no layer that defines logit_factors"):
        build(load(arguments("linen", **KEYS)).config, jax.devices()[:1])
