"""Several adapters over one base: their cost in a decode step, and their results."""

import functools

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, model_of, random_variables, tiny_config

from trainer.config.capabilities.lora_keys import ADAPTER
from trainer.config.errors import UserError
from trainer.inference.adapters import with_adapters
from trainer.inference.engine import Engine
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.served import serve
from trainer.leaves.source import joined, names_of, nested, parted
from trainer.models.adapters import apply_lora_on_base_params
from trainer.models.matrices import lora_kernels, matrix_names

RANK, GREEDY = 2, Sampling(0.0)
LORA = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 2.0}
LATENT = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 8}
LATENT |= {"q_lora_rank": 0, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_num_dense_layers": 0}
LATENT |= {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "shared_experts": 1,
    "base_moe_mlp_dim": 16,
    "lora_module_path": "self_attention",
    "base_num_decoder_layers": 1,
}
PROMPTS = [[5, 0, 17], [9, 3]]
TINY = {"base_num_decoder_layers": 1, "max_target_length": 32, "per_device_batch_size": 4}


class Named:
    """Adapters that only provide their keys."""

    def __init__(self, **keys):
        self.path = "there"
        self._keys = {"enable_lora": True, "lora_rank": RANK, "lora_alpha": 4.0, "lora_module_path": ""} | keys

    def lora_keys(self, config):
        return self._keys


@functools.cache
def engine_with(count, combination=ALL_COMBINATIONS[0]):
    served = serve(tiny_config(combination, **TINY), jax.devices()[:1])
    if count:
        config, ranks = with_adapters(served.config, [Named()] * count)
        served = served._replace(config=config, model=model_of(config), ranks=ranks)
    return Engine(served)


def adapters_of(engine):
    weights = names_of(joined(*engine.served.model.abstract))
    return {name: leaf for name, leaf in weights.items() if ADAPTER.search(name)}


def test_each_costs_its_own_bytes():
    """Adapters add only their own bytes and each slot's adapter number to a step's arguments, and the base is not
    copied."""
    sizes, arguments, temporaries = {}, {}, {}
    for count in (0, 1, 4):
        engine = engine_with(count)
        memory = engine.aot_compile()[1].memory
        sizes[count] = sum(leaf.size * leaf.dtype.itemsize for leaf in adapters_of(engine).values())
        arguments[count], temporaries[count] = memory.arguments, memory.temporaries
    base = sum(leaf.size * 4 for leaf in names_of(joined(*engine_with(0).served.model.abstract)).values())
    for count in (1, 4):
        assert sizes[count] == count * sizes[1]
        slots = 4 * 4 if count > 1 else 0  # each slot's adapter number
        assert arguments[count] - arguments[0] == sizes[count] + slots
        assert temporaries[count] - temporaries[0] < base / 4


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_a_batch_of_prompts_with_different_adapters(combination):
    """Packed in one row or prefilled one by one, each prompt gets the token that its merged model would draw."""
    engine = engine_with(2, combination)
    params, rest = random_variables(engine.served.model)
    weights, variables = names_of(joined(params, rest)), engine.hold(params, rest)
    prompts, chosen = [[5, 9, 3], [5, 9, 3], [7, 7]], [1, 2, 0]
    packed, result = engine.prefill_concat(variables, *engine.packed(prompts), sampling=GREEDY, adapters=chosen)
    alone = [
        engine.prefill(variables, engine.padded(row), len(row), sampling=GREEDY, adapter=number)[1]
        for row, number in zip(prompts, chosen, strict=True)
    ]
    expected = [_token(engine, weights, row, number) for row, number in zip(prompts, chosen, strict=True)]
    assert result.tokens.tolist() == [int(one.tokens[0]) for one in alone] == expected
    assert packed.sequences.adapters.tolist() == chosen
    assert expected[0] != expected[1]
    with pytest.raises(ValueError, match="adapter=3: the engine has 2"):
        engine.prefill(variables, engine.padded([1]), 1, adapter=3)


def _token(engine, weights, row, number):
    """Returns the next token from a model without adapters, with adapter `number` merged into its matrices."""
    base = {name: leaf for name, leaf in weights.items() if not ADAPTER.search(name)}
    if number:
        ranks = slice((number - 1) * RANK, number * RANK)
        kernels = lora_kernels(engine.config, dict.fromkeys(matrix_names(engine.config, "enable_lora"), (0, 0)))
        own = {}
        for kernel, at in kernels.items():
            a, b = (f"{kernel.removesuffix('/kernel')}/product/lora_{half}" for half in "ab")
            axis = weights[b].ndim - 1 - len(at.out_shape)
            own |= {a: weights[a][..., ranks], b: np.moveaxis(np.moveaxis(weights[b], axis, 0)[ranks], 0, axis)}
        base = names_of(_merged(nested(base), nested(own)))
    plain = engine_with(0)
    variables = plain.hold(*parted(nested(base), plain.served.model.abstract[1]))
    return int(plain.prefill(variables, plain.padded(row), len(row), sampling=GREEDY)[1].tokens[0])


_merged = jax.jit(apply_lora_on_base_params)


def test_what_cannot_share_a_batch():
    experts = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8}
    with pytest.raises(UserError, match="belongs to experts, which reorder rows"):
        with_adapters(tiny_config(ALL_COMBINATIONS[0], **experts), [Named(), Named()])
    config = tiny_config(ALL_COMBINATIONS[0], logits_via_embedding=False)
    with pytest.raises(UserError, match="output head decoder/logits_dense/kernel must be the same matrix for all rows"):
        with_adapters(config, [Named(), Named(lora_module_path="logits_dense")])
    with pytest.raises(UserError, match="lora_weight_qtype or lora_tile_size of their bases differ"):
        with_adapters(config, [Named(), Named(lora_weight_qtype="int8")])


def test_rows_may_choose_a_single_adapter():
    _, ranks = with_adapters(tiny_config(ALL_COMBINATIONS[0]), [Named()], apart=True)
    assert ranks.tolist() == [[False] * RANK, [True] * RANK]
    invariant = tiny_config(ALL_COMBINATIONS[0], batch_invariant=True, max_target_length=128)
    assert with_adapters(invariant, [Named(lora_alpha=3.0)])[1] is None
    with pytest.raises(UserError, match=r"lora_alpha / lora_rank = 1\.5, which is not a power of two"):
        with_adapters(invariant, [Named(lora_alpha=3.0)], apart=True)


def test_adapters_of_peft_say_nothing_about_quantization():
    config = tiny_config(ALL_COMBINATIONS[0])
    _, ranks = with_adapters(config, [Named(), Named(lora_weight_qtype="", lora_tile_size=0)])
    assert ranks.shape == (3, 2 * RANK)


def test_ranks_and_patterns_of_different_adapters():
    config, ranks = with_adapters(
        tiny_config(ALL_COMBINATIONS[0]), [Named(lora_module_path="mlp/wo"), Named(lora_rank=1), Named(lora_rank=3)]
    )
    assert (config.lora_rank, config.lora_alpha) == (6, 6.0)
    assert ranks.sum(axis=1).tolist() == [0, 2, 1, 3]
    assert (ranks.sum(axis=0) == 1).all()
    every = matrix_names(config, "enable_lora")
    assert {*lora_kernels(config, dict.fromkeys(every, (0, 0)))} == {name for name in every if "layers" in name}


@pytest.mark.parametrize("keys", [{"base_num_decoder_layers": 1}, LATENT], ids=["heads", "latents"])
def test_each_sequence_has_its_adapter(keys):
    config = tiny_config("nnx", return_log_prob=True, **LORA | keys)
    base = MaxEngine(config, jax.devices()[:1])
    ranks = np.array([[False, False], [True, False], [False, True]])
    engine = Engine(base.served._replace(ranks=ranks))
    weights = engine.hold(*random_variables(base.served.model))

    def after(tokens, adapter):
        return engine.prefill(weights, engine.padded(tokens), len(tokens), sampling=GREEDY, adapter=adapter)

    alone = [[after(prompt, adapter)[1].log_probs[0] for adapter in (0, 1, 2)] for prompt in PROMPTS]
    assert len({round(float(found), 4) for each in alone for found in each}) == 6
    _, packed = engine.prefill_concat(weights, *engine.packed(PROMPTS), sampling=GREEDY, adapters=[2, 1])
    np.testing.assert_allclose(packed.log_probs[:2], [alone[0][2], alone[1][1]], rtol=1e-5)  # summed in another order
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


def test_sequences_of_several_adapters_do_not_change_each_others_bits():
    keys = {key: value for key, value in LATENT.items() if key != "lora_module_path"}
    keys |= {"max_target_length": 128, "batch_invariant": True, "return_log_prob": True}
    keys |= {"dtype": "bfloat16"}
    served = serve(tiny_config(ALL_COMBINATIONS[0], **TINY | keys), jax.devices()[:1])
    config, ranks = with_adapters(served.config, [Named(lora_module_path="self_attention") for _ in range(2)])
    engine = Engine(served._replace(config=config, model=model_of(config), ranks=ranks))
    params = engine.hold(*random_variables(engine.served.model))

    def steps(adapters):
        state, found = engine.init_decode_state(), []
        for slot, number in enumerate(adapters):
            prefix, _ = engine.prefill(params, engine.padded(PROMPTS[0]), 3, sampling=GREEDY, adapter=number)
            state = engine.insert(prefix, state, slot)
        for _ in range(3):
            state, result = engine.generate(params, state)
            found.append(np.asarray(result.log_probs))
        return np.stack(found)

    together = steps([1, 2])
    assert not np.array_equal(together[:, 0], together[:, 1])
    for slot, number in enumerate([1, 2]):
        np.testing.assert_array_equal(steps([number])[:, 0], together[:, slot])


@pytest.mark.parametrize(
    ("keys", "said", "dtype"),
    [
        ({}, r"with dtype=float32, bits depend on the ranks of all adapters", "float32"),
        ({"lora_alpha": 3.0}, r"there has lora_alpha / lora_rank = 1.5, which is not a power of two", "bfloat16"),
        (
            {"lora_weight_qtype": "nf4"},
            r"there has lora_weight_qtype=nf4: bitwise equality is not verified for it",
            "bfloat16",
        ),
    ],
)
def test_adapters_without_the_bits_of_training_are_refused(keys, said, dtype):
    keys_of_base = {"max_target_length": 128, "batch_invariant": True, "dtype": dtype}
    config = tiny_config(ALL_COMBINATIONS[0], **TINY | keys_of_base)
    with pytest.raises(UserError, match=f"batch_invariant=true: {said}"):
        with_adapters(config, [Named(**keys)] * 2)
