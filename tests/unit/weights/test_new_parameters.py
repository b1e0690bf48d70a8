"""A base model with new parameters: what a checkpoint may lack, and which families read each other's parameters."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from checkpoint_cases import (
    FAMILIES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    in_pairs,
    maxtext_params,
    random_params,
    shapes_of,
    write_hf,
    write_maxtext,
)
from flax import nnx
from support import ALL_COMBINATIONS, LAST_CASE, arguments

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.family import Facts
from trainer.config.load import load
from trainer.layers.dense import RESIDUAL, Dense
from trainer.layers.stack import Stack
from trainer.leaves.source import Leaf, joined, names_of
from trainer.models.family import Family
from trainer.models.llama2.block import Block
from trainer.models.llama2.family import FAMILY as LLAMA2
from trainer.models.llama2.family import MAXTEXT
from trainer.ops.random import seed_key
from trainer.products.plain import product
from trainer.training.build import build
from trainer.training.start import start
from trainer.weights.load import load_parameters
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params

LLAMA = {"decoder_block": "llama2", **FAMILIES["llama2"]}
# A name means the same block in all tests, because `checkpoint_cases` caches shapes by configuration.
ADAPTED, GATED, PLAIN = (LLAMA | {"decoder_block": f"grown:{name}"} for name in ("adapted", "gated", "plain"))
GATE = "decoder/layers/gate"


class Adapter(nnx.Module):
    """Adds a low-rank term to a plain product."""

    def __init__(self, kernel, *, rngs):
        self.down = nnx.Param(jax.random.uniform(rngs.params(), (*kernel.in_shape, 2)))
        self.up = nnx.Param(jax.random.uniform(rngs.params(), (2, *kernel.out_shape)))

    def __call__(self, x, inputs, kernel, reduce_early, context):
        return product(x, inputs, kernel, reduce_early) + product(product(x, inputs, self.down[...]), 1, self.up[...])


class Gated(Block):
    """Llama's block, followed by a residual matrix."""

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        dtypes = {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}
        width = config.base_emb_dim
        self.gate = Dense([width], [width], ("embed", "mlp"), bias=True, rngs=rngs, **dtypes)

    def __call__(self, x, cache, context):
        x, cache = super().__call__(x, cache, context)
        return x + self.gate(x, RESIDUAL), cache


def one_stack(block):
    return lambda config: [Stack("layers", (block,), config.base_num_decoder_layers)]


@pytest.fixture(autouse=True)
def grown(monkeypatch):
    """Creates the module that contains the families."""
    rules = [("^(?!.*/gate/)", Adapter)]
    families = SimpleNamespace(
        adapted=Family(one_stack(Gated), products=lambda config: rules, maxtext=MAXTEXT, optional=[GATE]),
        gated=Family(one_stack(Gated)),
        plain=Family(one_stack(Block)),
        stated=Facts("grown:plain", reads=["routed_scaling_factor"]),
    )
    monkeypatch.setitem(sys.modules, "grown", families)


def loaded(path, config, lines=None, given=()):
    return load_parameters(str(path), config, abstract_of(config), [].append if lines is None else lines.append, given)


DRAWN = ADAPTED | {"head_dim": 16, "init_weights_seed": 3}


@functools.cache
def drawn():
    """Returns the initial weights, by name, that a model with the keys DRAWN has in addition to a Llama."""
    config, base = config_of(**DRAWN), shapes_of(config_of(**LLAMA, head_dim=16))

    @jax.jit
    def new(key):
        weights = names_of(joined(*make_model(config).init(key)))
        return {name: value for name, value in weights.items() if name not in base}

    return jax.device_get(new(seed_key(config.init_weights_seed)))


def write_ours(folder, config, params):
    leaves = {name: Leaf(value.shape, value.dtype, [lambda it=value: it]) for name, value in params.items()}
    folder.mkdir()
    write_params(folder, config, leaves, None)
    return folder


def under_our_name(path, name, trained="llama2"):
    return (
        f"{path} contains parameters of decoder_block={trained}; they are loaded with decoder_block=grown:{name}, "
        "which must compute the same, which is not checked"
    )


def write_kind(kind, folder, config, params):
    """Writes parameters of a Llama in a format. Heads are stored as halves."""
    if kind == "hugging face":
        return write_hf(folder, config, hf_tensors(params))
    if kind == "maxtext":
        return write_maxtext(folder, maxtext_params(config, params, scanned=True))
    return write_ours(folder, config, params)


@pytest.mark.parametrize("kind", ["hugging face", "maxtext", "ours"])
def test_a_base_under_adapters_and_a_new_matrix(tmp_path, kind):
    # With head_dim=16, MaxText's query scale is exact.
    base, config = config_of(**LLAMA, head_dim=16), config_of(**DRAWN, rope_interleave=kind != "maxtext")
    params = random_params(base)
    path = write_kind(kind, tmp_path / "base", base, params)
    lines = []
    found = loaded(path, config, lines)
    assert_same(found, drawn() | (in_pairs(params) if kind != "maxtext" else params))
    loads = "decoder/decoder_norm, decoder/layers, decoder/logits_dense, token_embedder/embedding"
    kernels = (
        *("layers/gate", "layers/mlp/wi_0/product", "layers/mlp/wi_1/product", "layers/mlp/wo/product"),
        *(f"layers/self_attention/{name}/product" for name in ("key", "out", "query", "value")),
        "logits_dense/product",
    )
    new = [f"decoder/{name}" for name in kernels]
    assert lines[-2:] == [
        f"{path}: loaded: {loads}",
        f"{path}: absent, with initial values: {', '.join(new)}",
    ]
    first = f"{path}: RoPE is assumed to rotate a head's entries as halves, like MaxText with model_name=default and "
    first += "rope_type=default"
    assert lines[:-2] == [first if kind == "maxtext" else under_our_name(path, "adapted")]

    # A complete checkpoint is loaded without a message.
    lines = []
    params = random_params(config, seed=1)
    assert_same(loaded(write_ours(tmp_path / "whole", config, params), config, lines), params)
    assert lines == []
    # It is unknown whether RoPE rotates an adapter's output.
    other = config_of(**ADAPTED, head_dim=16, rope_interleave=kind == "maxtext")
    with pytest.raises(UserError, match="declares no Layouts of"):
        loaded(tmp_path / "whole", other)


def test_a_group_is_absent_as_a_whole_or_an_error(tmp_path, monkeypatch):
    config = config_of(**ADAPTED, mtp_num_layers=1)
    params = random_params(config)
    source = open_source(str(write_ours(tmp_path / "whole", config, params)))
    monkeypatch.setattr("trainer.weights.load.open_source", lambda *args, **more: source)
    paths = source._paths

    def loaded_with(kept, lines):
        source._paths = {name: path for name, path in paths.items() if kept(name)}
        return loaded("there", config, lines)

    for missing in (
        f"{GATE}/bias",
        "decoder/layers/mlp/wo/product/up",
        "mtp_block/mtp_layer_1/mtp_1_embedding_norm/scale",
        "mtp_block/mtp_layer_1/mtp_1_transformer_layer/gate/bias",
        "decoder/layers/mlp/wo/kernel",  # never optional
    ):
        with pytest.raises(UserError, match=rf"1 tensor does not fit the configuration:\n  {missing}: missing"):
            loaded_with(lambda name, missing=missing: name != missing, [])

    def base(name):
        return "/product/" not in name and "transformer_layer/gate/" not in name

    lines = []
    kept = {name: value for name, value in params.items() if base(name)}
    found = names_of(loaded_with(base, lines))
    assert found.keys() == params.keys()
    assert_same({name: found[name] for name in kept}, kept)
    assert "mtp_block/mtp_layer_1/mtp_1_transformer_layer/gate" in lines[-1]
    assert f"{GATE}," not in lines[-1]
    assert lines[-1].endswith(" and 5 more")


def test_without_a_declaration_a_new_matrix_is_missing(tmp_path):
    base, config = config_of(**LLAMA), config_of(**GATED)
    params = random_params(base)
    with pytest.raises(UserError, match=rf"(?s){GATE}/bias: missing.*{GATE}/kernel: missing"):
        loaded(write_ours(tmp_path / "ours", base, params), config)
    with pytest.raises(UserError, match=rf"(?s){GATE}/bias: no Layout.*{GATE}/kernel: no Layout"):
        loaded(write_hf(tmp_path / "hf", base, hf_tensors(params)), config)


@pytest.mark.rest(covered_by="nnx; initial values are equal", cases=LAST_CASE)
@pytest.mark.parametrize("combination", {ALL_COMBINATIONS[0]: None, ALL_COMBINATIONS[-1]: None})
def test_a_run_starts_from_the_base_and_from_what_it_draws(tmp_path, combination):
    base = config_of(**LLAMA, head_dim=16)
    params = random_params(base)
    path = write_hf(tmp_path / "base", base, hf_tensors(params))
    keys = DRAWN | {"load_parameters_path": path, "sharding_tolerance": 1, "per_device_batch_size": 1}
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    run = build(load(arguments(combination, **keys, **mesh)).config, jax.devices())
    begin = run.codec.unpack(start(run, None, None, [].append, schedule_given=False).state)
    assert_same(begin.params, drawn() | params)
    wanted = run.codec.unpack(run.abstract_args()[0]).params
    for leaf, other in zip(jax.tree.leaves(begin.params), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == other.sharding


@pytest.mark.parametrize(("trained", "block"), [("mistral", "llama2"), ("llama2", "qwen3"), ("qwen3", "mistral")])
@pytest.mark.parametrize("kind", ["hugging face", "ours"])
def test_families_of_the_same_function(tmp_path, kind, trained, block):
    keys = FAMILIES[trained]
    params = random_params(it := config_of(decoder_block=trained, **keys))
    path = write_kind(kind, tmp_path / "there", it, params)
    lines = []
    config = config_of(decoder_block=block, **keys, rope_interleave=True)
    assert_same(loaded(path, config, lines), in_pairs(params))
    assert lines == [
        f"{path} contains parameters of decoder_block={trained}; they are loaded with decoder_block={block}, which "
        "computes the same"
    ]
    with pytest.raises(UserError, match=r"model than the configuration \(vocab_size=65\); to load it, give: vocab_s"):
        loaded(path, config_of(decoder_block=block, **keys, vocab_size=65))
    # trainer.export and trainer.generate start with this.
    words = [f"decoder_block={block}", "mtp_num_layers=0"]
    assert model_config(described(it), words, "there").decoder_block == block


REFUSED = [
    ("mixtral", "qwen3_moe", {"norm_topk_prob": True}),
    ("mixtral", "llama2", {}),
    ("qwen3_moe", "mixtral", {"use_qk_norm": True}),
    ("llama2", "gpt3", {"trainable_position_size": 128}),
]


@pytest.mark.parametrize(("trained", "block", "keys"), REFUSED)
def test_families_of_other_functions(tmp_path, trained, block, keys):
    params = random_params(it := config_of(decoder_block=trained, **FAMILIES[trained]))
    path = write_ours(tmp_path / "there", it, params)
    experts = {name: value for name, value in FAMILIES[trained].items() if block != "llama2" or "exp" not in name}
    config = config_of(decoder_block=block, **experts | keys)
    message = rf"\(decoder_block={block}, whose blocks may compute something else.*give: decoder_block={trained}"
    with pytest.raises(UserError, match=message):
        loaded(path, config, given=config.keys())


def test_code_that_only_a_checkpoint_names_is_not_imported(tmp_path):
    """Whether a family of this package computes the same is unknown; a family that the user names is trusted."""
    it = config_of(**PLAIN)
    path = write_ours(tmp_path / "there", it, params := random_params(it))
    (path / "config.yml").write_text((path / "config.yml").read_text().replace("grown:plain", "evil:family"))
    with pytest.raises(UserError, match=r"decoder_block=llama2, whose blocks.*give: decoder_block=evil:family"):
        loaded(path, config_of(**LLAMA))
    lines = []
    assert_same(loaded(path, it, lines), params)
    assert lines == [under_our_name(path, "plain", "evil:family")]


def test_keys_that_one_of_two_families_does_not_read(tmp_path):
    base = write_ours(tmp_path / "llama2", it := config_of(**LLAMA), random_params(it))
    with pytest.raises(
        UserError, match=r"decoder_block=llama2, which does not read fused_qkv=true; .*=grown:plain, leave these out"
    ):
        loaded(base, config_of(**PLAIN, fused_qkv=True))
    stated = LLAMA | {"decoder_block": "grown:stated"}
    assert loaded(base, config_of(**stated))
    with pytest.raises(UserError, match=r"does not read routed_scaling_factor=2\.0; "):
        loaded(base, config_of(**stated, routed_scaling_factor=2))
    # mixtral's key-value heads and experts are also keys of this family, and norm_topk_prob is a key of qwen3_moe.
    keys = FAMILIES["qwen3_moe"]
    moe = write_ours(tmp_path / "moe", it := config_of(decoder_block="qwen3_moe", **keys), random_params(it))
    own = keys | {"decoder_block": "grown:plain"}
    with pytest.raises(UserError, match=r"\(norm_topk_prob=false\); to load it, give: norm_topk_prob=true$"):
        loaded(moe, config_of(**own | {"norm_topk_prob": False}))
    with pytest.raises(UserError, match="moe_block/wo: the model has no such parameter"):
        loaded(moe, config_of(**own))


def test_a_family_of_the_same_stacks_with_another_norm_is_another_function(monkeypatch):
    from trainer.models.families import loads_from

    assert loads_from("llama2", "mistral")
    other = dataclasses.replace(LLAMA2, norm=nnx.LayerNorm)
    monkeypatch.setattr("trainer.models.mistral.family.FAMILY", other)
    assert not loads_from("llama2", "mistral")


def test_a_family_that_the_user_names_says_which_keys_of_a_checkpoint_count(tmp_path, monkeypatch):
    folder, block = tmp_path / "told", "told.facts:FACTS"
    folder.mkdir()
    text = 'FACTS = Facts("trainer.models.llama2.family:FAMILY", reads=["routed_scaling_factor"])'
    (folder / "facts.py").write_text(f"from trainer.config.family import Facts\n{text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    base = config_of(**LLAMA)
    path = write_ours(tmp_path / "ours", base, random_params(base))
    yml = (path / "config.yml").read_text().replace("llama2", block)
    (path / "config.yml").write_text(f"{yml}routed_scaling_factor: 2.5\n")
    open_source(str(path))
    assert "told.facts" not in sys.modules
    keys = open_source(str(path), block).keys
    assert model_config(keys, [f"decoder_block={block}"], str(path)).routed_scaling_factor == 2.5
    del sys.modules["told.facts"], sys.modules["told"]


def test_a_family_without_facts_may_read_every_key_of_experts():
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8}
    config = config_of(**PLAIN, **keys, routed_scaling_factor=2.5, norm_topk_prob=True)
    again = model_config(described(config), ["decoder_block=grown:plain"], "here")
    assert (again.routed_scaling_factor, again.norm_topk_prob) == (2.5, True)
