"""Several adapters in one batch: each sequence gets its own, in packed prompts and in steps on a cache."""

import jax
import numpy as np
import pytest
from support import tiny_config

from trainer.inference import MaxEngine, Sampling
from trainer.inference.engine import Engine
from trainer.ops.paths import by_name

LORA = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 2.0}
LATENT = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 8}
LATENT |= {"q_lora_rank": 0, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_num_dense_layers": 1}
LATENT |= {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "shared_experts": 1,
    "base_moe_mlp_dim": 16,
    "lora_module_path": "self_attention",
}
PROMPTS, GREEDY = [[5, 0, 17], [9, 3]], Sampling(0.0)


@pytest.mark.parametrize("keys", [{}, LATENT], ids=["heads", "latents"])
def test_each_sequence_has_its_adapter(keys):
    config = tiny_config("nnx", return_log_prob=True, **LORA | keys)
    base = MaxEngine(config, jax.devices()[:1])
    params, rest = base.load_params(say=lambda line: None)
    for i, (name, leaf) in enumerate(by_name(params).items()):
        if name.endswith("lora_b"):
            *path, last = name.split("/")
            node = params
            for key in path:
                node = node[key]
            node[last] = jax.random.normal(jax.random.key(i), leaf.shape)
    ranks = np.array([[False, False], [True, False], [False, True]])
    engine, weights = Engine(base.served._replace(ranks=ranks)), (params, rest)

    def after(tokens, adapter):
        return engine.prefill(weights, engine.padded(tokens), len(tokens), sampling=GREEDY, adapter=adapter)

    alone = [[after(prompt, adapter)[1].log_probs[0] for adapter in (0, 1, 2)] for prompt in PROMPTS]
    assert len({round(float(found), 4) for each in alone for found in each}) == 6
    _, packed = engine.prefill_concat(weights, *engine.packed(PROMPTS), sampling=GREEDY, adapters=[2, 1])
    np.testing.assert_allclose(packed.log_probs[:2], [alone[0][2], alone[1][1]], rtol=1e-5)  # sums in another order
    state = engine.init_decode_state()
    firsts = []
    for slot, (prompt, adapter) in enumerate(zip(PROMPTS, (2, 1), strict=True)):
        prefix, first = after(prompt, adapter)
        state = engine.insert(prefix, state, slot)
        firsts.append(int(first.tokens[0]))
    _, second = engine.generate(weights, state)
    for slot, (prompt, adapter) in enumerate(zip(PROMPTS, (2, 1), strict=True)):
        expected = after([*prompt, firsts[slot]], adapter)[1]
        np.testing.assert_allclose(second.log_probs[slot], expected.log_probs[0], rtol=1e-4)
    with pytest.raises(ValueError, match="adapter=3: the engine has 2 adapters"):
        after(PROMPTS[0], 3)
