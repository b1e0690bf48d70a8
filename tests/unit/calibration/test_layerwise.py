"""Calibration layer by layer: its statistics are compared with NumPy, and its layers with the model."""

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, copied, packed_batch, random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.calibration.layerwise import calibrate
from trainer.calibration.recording import Statistics
from trainer.config.errors import UserError
from trainer.layers.dense import Dense
from trainer.layers.sown import Activation
from trainer.ops.paths import by_name

ATTENTION = [f"self_attention/{name}/kernel" for name in ("query", "key", "value", "out")]
LATENT_ATTENTION = [f"self_attention/{name}/kernel" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "out")]
MLP = ["wi_0/kernel", "wi_1/kernel", "wo/kernel"]


def under(path, names):
    return [f"decoder/{path}/{name}" for name in names]


EXPERTS = "moe_layers/DeepSeekMoeBlock_0/MoeBlock_0"
# The keys of a model, and the kernels of its `Dense` layers in the order of the forward pass.
CASES = {
    "llama2": (
        {"decoder_block": "llama2", "base_num_decoder_layers": 1, "logits_via_embedding": False},
        under("layers", ATTENTION + [f"mlp/{name}" for name in MLP]),
    ),
    "gemma2": (  # a pattern of a layer with a window and one without
        {"decoder_block": "gemma2", "sliding_window_size": 3},
        [
            name
            for path in ("layers/layers_0", "layers/layers_1")
            for name in under(path, ATTENTION + [f"mlp/{name}" for name in MLP])
        ],
    ),
    "deepseek": (  # a dense layer, then a layer of experts with a shared expert
        {
            "decoder_block": "deepseek",
            "attention_type": "mla",
            "base_num_kv_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "base_moe_mlp_dim": 8,
            "shared_experts": 1,
            "first_num_dense_layers": 1,
            "routed_score_func": "sigmoid",
            "routed_bias": True,
            "routed_bias_update_rate": 0.01,
        },
        under("dense_layers", LATENT_ATTENTION + [f"mlp/{name}" for name in MLP])
        + under("moe_layers", LATENT_ATTENTION)
        + under("moe_layers/DeepSeekMoeBlock_0", ["MoeBlock_0/gate/kernel"])
        + under("moe_layers/DeepSeekMoeBlock_0/shared_experts", MLP),
    ),
}
# The last expert is never chosen: its bias is below the others by more than two scores.
BIAS = np.array([[0.3, 0.0, 0.1, -2.0]], np.float32)


@functools.cache
def made(case, **keys):
    """Returns the model, initial variables, and two batches."""
    config = tiny_config(ALL_COMBINATIONS[0], dtype="float32", **CASES[case][0] | keys)
    model = make_model(config)
    params, rest = random_variables(model)
    return model, params, jax.tree.map(lambda bias: BIAS, rest), [packed_batch(config, 2, seed) for seed in range(2)]


def reader(params, calls):
    """Returns a `Read` that appends its calls to `calls` and refuses to keep the parameters of two layers in memory."""
    alive = []

    def read(path, number):
        calls.append((path, number))
        found = functools.reduce(lambda tree, name: tree[name], path.split("/"), params)
        if number is None:
            return found
        assert not any(array() is not None for array in alive), "the layer before is still in memory"
        layer = jax.tree.map(lambda leaf: jnp.asarray(leaf[number]), found)
        alive[:] = map(weakref.ref, jax.tree.leaves(layer))
        return layer

    return read


def identity(name, kernel, statistics):
    return statistics, kernel


@functools.cache
def passed(case):
    """Returns the layers of a pass that quantizes nothing, the calls of `read`, and the progress lines."""
    model, params, rest, batches = made(case)
    calls, lines, layers = [], [], []
    run = calibrate(
        model.config, batches, reader(params, calls), rest, identity, lambda name: True, hessian=True, say=lines.append
    )
    for layer in run:
        layers.append(layer)
        assert len(calls) <= len(layers) + 3  # 3: the embedding, and two parts before the head; nothing is read ahead
    return layers, calls, lines


@functools.cache
def forward(case):
    """Returns the results of the model itself for each batch: its hidden states, its activations, and the inputs of its
    `Dense` layers in the order of the calls."""
    model, params, rest, batches = made(case)
    traced, seen, original = [], {}, Dense.__call__

    def call(self, x, *args):
        traced.append(x.shape)
        jax.debug.callback(lambda number, x: seen.update({int(number): np.array(x)}), len(traced), x)
        return original(self, x, *args)

    @jax.jit
    def run(batch):
        inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
        hidden, sown, _ = model.apply(params, rest, *inputs, capture=(Activation,))
        return hidden, sown["Activation"]

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dense, "__call__", call)
        for batch in batches:
            results = copied(run(batch))
            jax.effects_barrier()
            found.append((*results, [seen[number] for number in sorted(seen)]))
            seen.clear()
    return found


def statistics_of(case):
    return {name: it for layer in passed(case)[0] for name, it in layer.stored.items()}


def inputs_of(case):
    """Returns the inputs [n, in] of each `Dense` kernel, without padding, by name."""
    batches, names = made(case)[3], CASES[case][1]
    rows = {name: [] for name in names}
    for batch, (_, _, inputs) in zip(batches, forward(case), strict=True):
        real = batch["inputs_segmentation"] != 0
        assert not real.all()
        for name, x in zip(names, inputs, strict=True):
            rows[name].append(x[real].reshape(real.sum(), -1))
    return {name: np.concatenate(parts).astype(np.float64) for name, parts in rows.items()}


def assert_of(statistics, rows):
    """Checks statistics against rows [n, in]."""
    assert statistics.rows == len(rows)
    np.testing.assert_allclose(statistics.absolute, np.abs(rows).sum(0), rtol=1e-5, atol=1e-5)
    hessian = rows.T @ rows
    np.testing.assert_allclose(statistics.hessian, hessian, rtol=1e-5, atol=1e-5 * (np.abs(hessian).max() + 1))


@pytest.mark.parametrize("case", CASES)
def test_the_inputs_of_every_kernel(case):
    """Compares statistics with the inputs of the model's layers, without padding. Another kernel's statistics and
    altered ones do not match."""
    found, inputs = statistics_of(case), inputs_of(case)
    for name, rows in inputs.items():
        assert_of(found[name], rows)
    first, *_, last = inputs
    for fault in (found[last], found[first]._replace(absolute=found[first].absolute * 1.001)):
        with pytest.raises(AssertionError):
            assert_of(fault, inputs[first])
    others = found.keys() - inputs.keys()
    experts = {f"decoder/{EXPERTS}/{name}" for name in ("wi_0", "wi_1", "wo")}
    assert others == {"llama2": {"decoder/logits_dense/kernel"}, "deepseek": experts}.get(case, set())


@pytest.mark.parametrize("case", CASES)
def test_the_layers_one_by_one_are_the_model(case):
    _, params, _, _ = made(case)
    layers, calls, lines = passed(case)
    outer = {"decoder_norm", "logits_dense"}
    stacks = [path for path in by_name(params["decoder"]) if path.split("/")[0] not in outer]
    in_stacks = [(layer.path, layer.number) for layer in layers if layer.number is not None]
    assert calls[0] == ("token_embedder", None)
    assert calls[1 : len(in_stacks) + 1] == in_stacks
    read = {f"decoder/{path}" for path in stacks}
    assert all(any(name.startswith(f"{path}/") for path, _ in in_stacks) for name in read)
    assert [line for line in lines if "left" in line][-1] == f"layer {len(in_stacks)} of {len(in_stacks)}, 0:00:00 left"
    for i, (hidden, sown, _) in enumerate(forward(case)):
        for layer in layers:
            if layer.number is not None:
                output = sown[f"{layer.path}/output"][layer.number]
                np.testing.assert_allclose(
                    layer.hidden[i], output, atol=1e-6 * np.abs(output).max(), err_msg=layer.path
                )
        if case == "llama2":
            np.testing.assert_allclose(layers[-1].hidden[i], hidden, atol=1e-6 * np.abs(hidden).max())


def test_the_output_head_reads_normalized_states():
    """Only a separate head matrix is calibrated, and not a tied embedding."""
    batches = made("llama2")[3]
    real = [batch["inputs_segmentation"] != 0 for batch in batches]
    rows = [hidden[mask] for mask, (hidden, _, _) in zip(real, forward("llama2"), strict=True)]
    assert_of(statistics_of("llama2")["decoder/logits_dense/kernel"], np.concatenate(rows).astype(np.float64))
    assert "token_embedder/embedding" not in statistics_of("gemma2")


def test_each_expert_sees_its_own_tokens():
    """An expert's inputs are the router's inputs for the tokens that it assigns to the expert. NumPy computes wo's
    inputs."""
    _, params, _, batches = made("deepseek")
    found, inputs = statistics_of("deepseek"), inputs_of("deepseek")
    x = inputs[f"decoder/{EXPERTS}/gate/kernel"]
    weights = [
        sown[f"decoder/{EXPERTS}/expert_weights"][0][batch["inputs_segmentation"] != 0]
        for batch, (_, sown, _) in zip(batches, forward("deepseek"), strict=True)
    ]
    chosen = np.concatenate(weights) != 0
    layer = functools.reduce(lambda tree, name: tree[name], f"decoder/{EXPERTS}".split("/"), params)
    matrices = {name: layer[name][0].astype(np.float64) for name in ("wi_0", "wi_1", "wo")}
    assert chosen.sum(0)[-1] == 0 < chosen.sum(0)[:-1].min()
    for expert in range(4):
        rows = x[chosen[:, expert]]
        gate, up = rows @ matrices["wi_0"][expert], rows @ matrices["wi_1"][expert]
        for name, expected in {"wi_0": rows, "wi_1": rows, "wo": gate / (1 + np.exp(-gate)) * up}.items():
            assert_of(jax.tree.map(lambda part: part[expert], found[f"decoder/{EXPERTS}/{name}"]), expected)  # noqa: B023
    assert passed("deepseek")[2][1] == "layer 2: 1 of 4 experts of DeepSeekMoeBlock_0/MoeBlock_0 received no tokens"
    assert not found[f"decoder/{EXPERTS}/wo"].mean_abs()[-1].any()


def test_the_next_layer_reads_what_quantized_kernels_compute():
    """With kernels of zeros, a layer adds nothing to the embedding."""
    model, params, rest, batches = made("llama2")
    seen = []

    def zeros(name, kernel, statistics):
        seen.append((name, kernel.shape, statistics))
        return name, jnp.zeros_like(kernel)

    outputs = r"out/kernel", r"wo/kernel"
    run = calibrate(
        model.config, batches, reader(params, []), rest, zeros, lambda name: name.endswith(outputs), hessian=False
    )
    (layer,) = run
    assert layer.stored == {name: name for name in under("layers", ["mlp/wo/kernel", "self_attention/out/kernel"])}
    assert {name: shape for name, shape, _ in seen}["decoder/layers/self_attention/out/kernel"] == (32, 16)
    assert all(isinstance(it, Statistics) and it.hessian is None for *_, it in seen)
    for hidden, (_, sown, _) in zip(layer.hidden, forward("llama2"), strict=True):
        np.testing.assert_array_equal(hidden, sown["embedding"])


def test_what_cannot_be_calibrated(monkeypatch):
    model, params, rest, batches = made("llama2")

    def start(config=model.config, batches=batches, chosen=lambda name: True):
        next(calibrate(config, batches, reader(params, []), rest, identity, chosen, hessian=False))

    with pytest.raises(UserError, match=r"no matrix is chosen.*decoder/layers/mlp/wi_0/kernel"):
        start(chosen=lambda name: False)
    with pytest.raises(UserError, match="no tokens other than padding"):
        start(batches=[])
    sparse = tiny_config(ALL_COMBINATIONS[0], weight_sparsity_n=2, weight_sparsity_m=4, **CASES["llama2"][0])
    with pytest.raises(UserError, match="weight_sparsity_m=4: a model with masked weights"):
        start(sparse)
    own = tiny_config(ALL_COMBINATIONS[0], decoder_block="stored_int8:dense", logits_via_embedding=False)
    with pytest.raises(UserError, match=r"wi_0/kernel.*the family defines the product"):
        start(own)
    monkeypatch.setattr("os.sysconf", lambda name: 100)  # the number of pages, and the page size
    with pytest.raises(UserError, match="rows of text take half of this machine's memory; give fewer"):
        start()
