"""With batch_invariant, the log-probability of a drawn token equals the one that training computes, bit for bit.

The reference is the log-probability that was returned when the token was drawn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, EVERY_MATRIX, model_of, pinned, random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.config.capabilities.invariant_keys import TILE, compiler_options, unchecked
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.load import load
from trainer.inference import max_engine
from trainer.inference.engine import Engine
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.models.families import axis_rules
from trainer.objectives.forward import hidden_states, target_log_probs
from trainer.ops.attention import Mask, dot_product_attention
from trainer.ops.invariant import invariant_attention, rounded
from trainer.sharding import make_mesh, named_sharding, on_mesh

LENGTH, VOCABULARY = 256, 307
MODEL = {
    "base_emb_dim": 64,
    "head_dim": 16,
    "base_mlp_dim": 176,
    "base_num_decoder_layers": 1,
    "vocab_size": VOCABULARY,
    "max_target_length": LENGTH,
    "return_log_prob": True,
    "batch_invariant": True,
}
TWO = {"base_num_decoder_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 96}
# Norms before and after, windows and soft caps; latent attention with experts; learned positions.
KINDS = {
    "llama2": {},
    "gemma2": {"decoder_block": "gemma2", "sliding_window_size": 70, "attn_logits_soft_cap": 50.0, **TWO},
    "deepseek": EVERY_MATRIX | {"first_num_dense_layers": 0},
    "mixtral": {"decoder_block": "mixtral", **EXPERTS},
    "qwen3_moe": {"decoder_block": "qwen3_moe", **EXPERTS},
    "gpt3": {"decoder_block": "gpt3", "base_num_kv_heads": 4, "trainable_position_size": LENGTH},
    "lora": {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8},
    "unrolled": {"scan_layers": False, "rope_type": "yarn", **TWO},
}
PARTS = {"use_chunked_prefill": True, "prefill_chunk_size": 64, "enable_prefix_caching": True}


def engine_of(*, devices=1, **keys):
    config = tiny_config("nnx", devices=devices, **MODEL | keys)
    return MaxEngine(config, jax.devices()[:devices])


def requests(count, seed=3, shortest=3):
    """Returns prompts of `shortest` to 120 tokens, and the number of tokens to draw after each. Some prompts share
    their first 70 tokens. All prompts above 64 tokens are prefilled by the same program."""
    random = np.random.default_rng(seed)
    common = random.integers(0, VOCABULARY, 70).tolist()
    prompts = [random.integers(0, VOCABULARY, random.integers(shortest, 120)).tolist() for _ in range(count)]
    prompts[::3] = [common + prompt[:30] for prompt in prompts[::3]]
    return prompts, random.integers(3, 40, count).tolist()


def rollouts(engine, params, prompts, limits, adapters=()):
    """Returns the drawn tokens and their log-probabilities for each prompt. There are more requests than slots."""
    scheduler = Scheduler(engine, params)
    for seed, (prompt, limit, adapter) in enumerate(zip(prompts, limits, adapters or [0] * len(prompts), strict=True)):
        scheduler.submit(prompt, limit=limit, sampling=Sampling(1.0), seed=seed, adapter=adapter)
    found = [([], []) for _ in prompts]
    for event in scheduler.run():
        found[event.request][0].append(event.token)
        found[event.request][1].append(event.log_prob)
    return found


def rows_of(texts, together):
    """Returns a batch with as many rows as `texts`, and the (row, index) of each text's first token. Each text has its
    own row, or with `together` texts are packed into the first rows."""
    rows, places = [], []
    for text in texts:
        pairs = len(text) - 1
        if not (together and rows and rows[-1]["end"] + pairs <= LENGTH):
            rows.append({"end": 0, "array": np.zeros((4, LENGTH), np.int32)})
        row, start = rows[-1], rows[-1]["end"]
        segment = row["array"][3].max() + 1
        row["array"][:, start : start + pairs] = text[:-1], text[1:], np.arange(pairs), np.full(pairs, segment)
        row["end"] = -(-(start + pairs) // TILE) * TILE
        places.append((len(rows) - 1, start))
    empty = [np.zeros((4, LENGTH), np.int32)] * (len(texts) - len(rows))
    fields = np.stack([*(row["array"] for row in rows), *empty], axis=1)
    names = ("inputs", "targets", "inputs_position", "inputs_segmentation")
    return dict(zip(names, fields, strict=True)) | {"row": np.arange(len(texts), dtype=np.int32)}, places


def log_probs_of(model):
    """Returns `(params, rest, batch) -> the log-probabilities of the targets`, float32 [b, t]."""

    def found(params, rest, batch):
        hidden, _ = hidden_states(model.apply, params, rest, batch, None, ())
        return target_log_probs(model.apply, params, rest, hidden, batch["targets"]).target

    return found


def training_log_probs(model, params, batches, mesh=None, rules=None):
    """Returns the log-probabilities of each batch's targets in the forward pass of a training step."""

    def loss(params, rest, batch):
        found = log_probs_of(model)(params, rest, batch)
        return jnp.sum(jnp.where(batch["inputs_segmentation"] != 0, found, 0)), found

    step = jax.value_and_grad(loss, has_aux=True)
    if mesh is not None:
        step = on_mesh(mesh, rules)(step)
        axes = model.param_axes, model.rest_axes
        place = lambda array, names: jax.device_put(array, named_sharding(mesh, names, array.shape, rules))  # noqa: E731
        params = jax.tree.map(place, params, axes)
        names = ("activation_batch", None)
        batches = [{name: place(it, names[: it.ndim]) for name, it in batch.items()} for batch in batches]
    step = jax.jit(step, compiler_options=compiler_options(model.config, "cpu"))
    return [np.asarray(step(*params, batch)[0][1]) for batch in batches]


def differing(model, params, prompts, found, together=(True, False), **mesh):
    """Returns how many log-probabilities of rollouts differ in any bit from training, with packed or separate rows."""
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, found, strict=True)]
    batches, all_places = zip(*(rows_of(texts, shared) for shared in together), strict=True)
    wrong = 0
    for places, log_probs in zip(all_places, training_log_probs(model, params, batches, **mesh), strict=True):
        for prompt, text, (_, drawn), (row, start) in zip(prompts, texts, found, places, strict=True):
            expected = log_probs[row, start + len(prompt) - 1 : start + len(text) - 1]
            wrong += np.sum(np.asarray(drawn, np.float32).view(np.int32) != expected.view(np.int32))
    return wrong


@pytest.mark.rest(
    covered_by="deepseek in float32, mixtral in bfloat16",
    cases=("mixtral-float32", "deepseek-bfloat16", "llama2", "gemma2", "qwen3_moe", "gpt3", "lora", "unrolled"),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_drawn_tokens_are_those_of_training(kind, dtype):
    engine = engine_of(dtype=dtype, **KINDS[kind])
    variables, (prompts, limits) = random_variables(engine.served.model), requests(5, shortest=65)
    found = rollouts(engine, engine.hold(*variables), prompts, limits)
    assert differing(engine.served.model, variables, prompts, found) == 0


@pytest.mark.rest(covered_by="its product; unit/inference/test_adapters.py")
def test_several_adapters_have_the_bits_of_their_training():
    keys, owners = {"enable_lora": True, "dtype": "bfloat16"}, np.repeat([1, 2], [4, 16])
    whole = engine_of(**keys, lora_rank=20, lora_alpha=20)
    engine = Engine(whole.served._replace(ranks=np.arange(3)[:, None] == owners))
    variables, (prompts, limits) = random_variables(whole.served.model), requests(6)
    adapters = [1, 2] * 3
    found = rollouts(engine, engine.hold(*variables), prompts, limits, adapters)

    def own(path, leaf, ranks):
        leaf = leaf[..., ranks] if path[-1].key == "lora_a" else leaf
        return leaf[:, ranks] if path[-1].key == "lora_b" else leaf

    for number, rank in ((1, 4), (2, 16)):
        trained = make_model(tiny_config("nnx", **MODEL, **keys, lora_rank=rank, lora_alpha=rank))
        held = jax.tree.map_with_path(functools.partial(own, ranks=owners == number), variables)
        mine = [i for i, adapter in enumerate(adapters) if adapter == number]
        assert differing(trained, held, [prompts[i] for i in mine], [found[i] for i in mine], [True]) == 0


@functools.cache
def plain():
    engine = engine_of(dtype="float32")
    variables = random_variables(engine.served.model)
    return engine, engine.hold(*variables), variables


@functools.cache
def plain_rollouts():
    """Returns requests with prompts of all lengths, and their rollouts."""
    (engine, params, _), asked = plain(), requests(5)
    return asked, rollouts(engine, params, *asked)


def test_neither_chunks_nor_prefixes_nor_other_requests_change_the_bits():
    """The engine with chunks and kept prefixes has one slot, so that each request is alone."""
    asked, expected = plain_rollouts()
    engine = engine_of(dtype="float32", per_device_batch_size=1, **PARTS)
    assert rollouts(engine, plain()[1], *asked) == expected


def test_prompts_of_one_row_begin_at_multiples_of_a_tile():
    engine, params, _ = plain()
    prompts = requests(2)[0]
    packed = engine.packed(prompts)
    assert packed.start_pos.tolist() == [0, TILE]
    _, together = engine.prefill_concat(params, *packed, seeds=[3, 4])
    for i, prompt in enumerate(prompts):
        _, alone = engine.prefill(params, engine.padded(prompt), len(prompt), seed=3 + i)
        assert (alone.tokens[0], alone.log_probs[0]) == (together.tokens[i], together.log_probs[i])
    with pytest.raises(
        ValueError, match=r"start_pos=\[0, 5\]: with batch_invariant, prompts begin at multiples of 128"
    ):
        engine.prefill_concat(params, *packed._replace(start_pos=np.array([0, 5])))


def test_devices_with_whole_rows_and_whole_matrices():
    keys = {"ici_data_parallelism": 4, "ici_fsdp_parallelism": 1, "per_device_batch_size": 1, "dtype": "float32"}
    engine, (_, params, variables), asked = engine_of(devices=4, **keys), plain(), requests(5, shortest=65)
    found = rollouts(engine, engine.hold(*variables), *asked)
    assert found == rollouts(plain()[0], params, *asked)
    training = mesh_of(ici_data_parallelism=2, ici_fsdp_parallelism=2)
    assert differing(engine.served.model, variables, asked[0][:4], found[:4], [False], **training) == 0
    with pytest.raises(UserError, match="batch_invariant=true: fsdp has 4 devices, which would share the one row"):
        engine_of(devices=4)


def mesh_of(**keys):
    """Returns a mesh of four devices for training, and its axis rules."""
    config = tiny_config("nnx", devices=4, **MODEL | keys)
    return {"mesh": make_mesh(config, jax.devices()[:4]), "rules": axis_rules(config)}


@pytest.mark.rest(covered_by="nothing: it tests the tests")
def test_without_the_key_bits_differ():
    """Shows that the tests above can fail."""
    engine = engine_of(batch_invariant=False, dtype="bfloat16")
    variables, (prompts, limits) = random_variables(engine.served.model), requests(7)
    found = rollouts(engine, engine.hold(*variables), prompts, limits)
    assert differing(engine.served.model, variables, prompts, found)


def test_combinations_have_the_same_bits():
    """Covers the forward pass. test_five_combinations.py shows that the gradients compile to the same program."""
    batch = rows_of(requests(1)[0], together=True)[0]
    models = [model_of(tiny_config(it, **MODEL | {"dtype": "float32"})) for it in ALL_COMBINATIONS]
    expected, *others = [jax.jit(log_probs_of(model)).lower(*model.abstract, batch).as_text() for model in models]
    assert "stablehlo.dot_general" in expected
    assert all(found == expected for found in others)


@pytest.mark.parametrize("how", [{}, {"window": 20, "soft_cap": 5.0, "sinks": True}], ids=["plain", "every option"])
def test_attention_is_that_of_the_reference(how):
    rng = np.random.default_rng(0)
    shapes = [(2, 150, 4, 8), (2, 150, 2, 8), (2, 150, 2, 6), (2, 150, 4, 6), (4,)]
    query, key, value, gradient, sinks = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    index = np.broadcast_to(np.arange(150), (2, 150))
    mask = Mask(index % 64, index % 64, 1 + index // 64, 1 + index // 64)
    how = how | ({"sinks": sinks} if "sinks" in how else {})

    @functools.partial(jax.jit, static_argnums=0)
    def pulled(attention, *arrays):
        found, pull = jax.vjp(lambda *arrays: attention(*arrays, mask, **how), *arrays)
        return found, pull(gradient)

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),  # summed in another order
        pulled(invariant_attention, query, key, value),
        pulled(dot_product_attention, query, key, value),
    )


def test_a_rounded_product_is_rounded_before_it_is_added():
    a, b, c = np.random.default_rng(0).normal(size=(3, 4096)).astype(np.float32)
    found = jax.jit(lambda a, b, c: rounded(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(found, a * b + c)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"max_target_length": 200}, "rows must be a multiple of 128 tokens"),
        ({"attention": "dot_product"}, "only the attention op invariant is batch-invariant"),
        ({"dropout_rate": 0.1}, "training would drop values that generation does not"),
        ({"quantization": "int8"}, "bitwise equality is not verified for quantized products"),
        ({"quantize_kvcache": True}, "training has no 8-bit cache"),
        ({"ici_tensor_parallelism": 2}, "each device must have whole rows and whole matrices"),
        ({"ici_expert_parallelism": 2}, "each device must have whole rows and whole matrices"),
        ({"prefill_chunk_size": 100}, "chunks must be a multiple of 64 tokens"),
        ({"decoder_block": "team_block:TeamBlock"}, "bitwise equality is not verified for custom blocks"),
        (
            {"decoder_block": "mixtral", **EXPERTS, "sparse_matmul": False, "capacity_factor": 1.5},
            "which tokens are dropped depends on the batch",
        ),
    ],
)
def test_what_is_not_proved_is_refused_by_name(keys, problem):
    words = [f"{key}={value}" for key, value in (pinned("nnx") | MODEL | {"dataset_type": "synthetic"} | keys).items()]
    with pytest.raises(UserError, match=problem):
        load(["base.yml", *words])


def test_a_mesh_that_is_filled_in_is_refused_too():
    with pytest.raises(UserError, match="batch_invariant=true: tensor has 2 devices: each device must have whole rows"):
        tiny_config("nnx", devices=2, **MODEL, ici_fsdp_parallelism=1, ici_tensor_parallelism=-1)


def test_another_loop_than_that_of_the_training_is_refused(monkeypatch):
    saved = {"batch_invariant": True, "scan_layers": False, "dtype": "float32"}
    monkeypatch.setattr(max_engine, "open_source", lambda *args, **how: None)
    monkeypatch.setattr(max_engine, "keys_of_run", lambda path: saved)
    with pytest.raises(UserError, match="there was trained with scan_layers=false; set the same for generation"):
        plain()[0]._check_bits("there")
    saved["batch_invariant"] = False  # then no forward pass of that training computes these bits
    plain()[0]._check_bits("there")


def test_what_nobody_has_compared_is_said():
    config = tiny_config("nnx", **MODEL)
    assert not unchecked(config, "cpu")
    assert not unchecked(Config({"batch_invariant": False}), "tpu")
    assert "have not been compared on tpu" in unchecked(config, "tpu")
