"""Products receive the context of their layer, and rules that match nothing are refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, first_tree, lowered_update, packed_batch, state_from

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models.deepseek import family as deepseek
from trainer.ops.dropout import dropout
from trainer.products.plain import grouped_product, product
from trainer.training.batches import placed
from trainer.training.build import build

DEEPSEEK = {
    **{"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "head_dim": 12},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32, "shared_experts": 1},
    **{"first_num_dense_layers": 1, "base_num_decoder_layers": 2, "dropout_rate": 0.5},
    **{"logits_via_embedding": False, "load_balance_loss_weight": 0.0, "sharding_tolerance": 1, "opt_type": "sgd"},
}
MESH = {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 4}
MICROBATCHES = {"gradient_accumulation_steps": 2, "per_device_batch_size": 1}


class Noted:
    """Rules whose products apply dropout to their inputs, by key and row, and record the kernels."""

    def __init__(self):
        self.met = []

    def make(self, kernel, *, rngs):
        def plain(x, inputs, value, reduce_early, context):
            self.met.append((kernel.names, context is not None))
            if context is not None:
                x = dropout(x, context.at(7).key, context.rows, 0.25)
            return product(x, inputs, value, reduce_early)

        def grouped(x, value, sizes, context):
            self.met.append((kernel.names, context is not None))
            # Rows of x are sorted by expert, so only values common to all rows are usable.
            key = context.at(8).key
            scale = 1.0 if key is None else 1 + jax.random.uniform(key)
            return scale * grouped_product(x, value, sizes) + 0.0 * jnp.sum(context.rows)

        return grouped if kernel.groups else plain


@pytest.fixture
def noted(monkeypatch):
    found = Noted()
    family = dataclasses.replace(deepseek.FAMILY, products=lambda config: [("kernel$|/w[io]", found.make)])
    monkeypatch.setattr(deepseek, "FAMILY", family)
    return found


def made(combination=ALL_COMBINATIONS[0], **keys):
    devices = 4 if any("parallelism" in key for key in keys) else 1
    keys = {"per_device_batch_size": 8} | DEEPSEEK | keys
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


@pytest.mark.rest(covered_by="stochastic rounding follows the key and the row")
def test_a_product_uses_the_key_and_the_rows_of_its_layer(noted):
    """NNX and Linen have the same program. The loss depends on the step, but not on the mesh or on accumulation."""
    runs = [made(name, mtp_num_layers=1) for name in sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]})]
    texts = set()
    for run in runs:
        noted.met.clear()
        texts.add(lowered_update(run).as_text())
        assert {seen for names, seen in noted.met if "vocab" in names} == {False}
        assert all(seen for names, seen in noted.met if "vocab" not in names)
        assert {names for names, _ in noted.met} >= {
            ("embed", "q_lora_up_proj"),
            ("kv_lora", "kv_heads", "kv_head_dim"),
            ("heads", "kv", "embed"),
            ("embed_moe", "exp"),
            ("exp", "embed_moe", "mlp"),
            ("exp", "mlp", "embed_moe"),
            ("embed", "mlp"),
        }
    assert len(texts) == 1

    run = made()
    tree = first_tree(run)

    def losses(run, *steps):
        compiled, batch = run.compile(), placed(run, packed_batch(run.config, 8))
        states = (state_from(run, tree._replace(step=np.asarray(step, np.int32))) for step in steps)
        return [float(run.computation.read(compiled(state, batch, ())[1], 0)["loss"]) for state in states]

    first, second = losses(run, 0, 1)
    assert abs(second - first) > 1e-4
    np.testing.assert_allclose(losses(made(**MESH, **MICROBATCHES), 0), [first], rtol=1e-5)


def test_a_rule_that_matches_no_matrix_is_refused(monkeypatch):
    family = dataclasses.replace(deepseek.FAMILY, products=lambda config: [("mlp/w0", Noted().make)])
    monkeypatch.setattr(deepseek, "FAMILY", family)
    with pytest.raises(UserError, match="its rules for products mlp/w0 match no parameter"):
        made()
