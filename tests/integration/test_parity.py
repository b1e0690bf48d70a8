"""trainer.parity as a user runs it: equal programs, planted differences, and errors."""

import dataclasses
import itertools
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from parity_cases import run
from support import ALL_COMBINATIONS

from trainer import parity
from trainer.compare import measure, programs
from trainer.layers.stack import Stack
from trainer.models.deepseek import family as deepseek
from trainer.models.llama2 import block as llama2
from trainer.models.mistral import family as mistral
from trainer.objectives import tiling
from trainer.optim.average import averaging
from trainer.optim.qk_clip import qk_clip
from trainer.optim.registry import OPTIMIZERS
from trainer.optim.spikes import skip_spikes
from trainer.sharding import Axes
from trainer.training import build as building
from trainer.training import rules, step
from trainer.training.step import Gradients

QUANTITIES = ["parameters", "activations", "loss", "gradients", "updated parameters", "optimizer state"]
QUANTITIES += measure.LATER


@pytest.mark.rest(
    covered_by="integration/test_five_combinations.py; a wrong shift in one combination, which parity finds"
)
@pytest.mark.skipif(len(ALL_COMBINATIONS) == 1, reason="there is one combination")
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


def test_a_planted_difference_is_found_in_its_layer(capsys, monkeypatch):
    layers = itertools.cycle(range(3))

    class Wrong(llama2.Block):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.mlp = WrongMLP(
                16, 32, config.mlp_activations, dtype=jnp.float32, weight_dtype=jnp.float32, rngs=rngs, dropout_rate=0.0
            )

    class WrongMLP(llama2.MLP):
        def __call__(self, *args):
            # In an unrolled loop, a block is traced once for every layer.
            return super().__call__(*args) * (1.001 if next(layers) == 1 else 1.0)

    stacks = [Stack("layers", (Wrong,), 3)]
    monkeypatch.setattr(mistral, "FAMILY", dataclasses.replace(mistral.FAMILY, stacks=lambda config: stacks))
    code, out, _ = run(capsys, "right.decoder_block=mistral", only_forward=True, scan_layers=False)
    lines = out.splitlines()
    assert code == 1
    assert lines[-1] == "left and right differ first in activations: decoder/layers/mlp_output, layer 1"
    rows = {line.split("  ")[0] or line.strip().split("  ")[0]: line.split() for line in lines}
    assert rows["parameters"][2:] == ["equal", "bits"]
    assert rows["layer 0"][3:] == ["equal", "bits"]
    assert rows["layer 1"][3] == "apart"
    assert rows["layer 1"][-1] == "mlp_output"
    assert rows["layer 2"][3] == "apart"


@pytest.mark.rest(covered_by="a fault in the update of adamw, and sides of one program")
def test_a_fault_in_routing_is_named(capsys, monkeypatch):
    """One side's router swaps the first token's two chosen experts in its second MoE layer."""
    calls = itertools.count()

    class Wrong(deepseek.Block):
        @staticmethod
        def score(config):
            right = deepseek.Block.score(config)

            def wrong(*args):
                found = right(*args)
                if next(calls) != 1:  # in an unrolled loop, a block is traced once for every layer
                    return found
                return found._replace(expert=found.expert.at[0, 0].set(found.expert[0, 0, ::-1]))

            return wrong

    stacks = [Stack("moe_layers", (Wrong,), 3)]
    own = SimpleNamespace(family=dataclasses.replace(deepseek.FAMILY, stacks=lambda config: stacks))
    monkeypatch.setitem(sys.modules, "wrong_routing", own)
    keys = {
        **{"attention_type": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "base_num_kv_heads": 2},
        **{"base_moe_mlp_dim": 8, "shared_experts": 1, "first_num_dense_layers": 0, "base_num_decoder_layers": 3},
        **{"routed_score_func": "sigmoid", "routed_bias": True, "logits_via_embedding": False},
    }
    words = ("left.decoder_block=deepseek", "right.decoder_block=wrong_routing:family")
    _, out, error = run(capsys, *words, only_forward=True, scan_layers=False, **keys)
    assert out, error
    name = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/expert_weights"
    assert out.splitlines()[-1] == f"left and right differ first in activations: {name}, layer 1"


@pytest.mark.rest(covered_by="a fault in the update of adamw, and a lost tile")
@pytest.mark.skipif(len(ALL_COMBINATIONS) == 1, reason="there is one combination")
def test_a_clip_along_another_axis_is_found(capsys, monkeypatch):
    monkeypatch.setattr(programs, "MEASURES", programs.MEASURES[-1:])
    keys = {"use_qk_clip": True, "qk_clip_threshold": 0.1, "head_dim": 2, "base_num_decoder_layers": 1}
    sides = (f"left={ALL_COMBINATIONS[0]}", f"right={ALL_COMBINATIONS[-1]}")
    code, out, _ = run(capsys, *sides, **keys)
    assert code == 0, out

    class Wrong:
        """A block with as many heads as entries per head, so that transposed factors fit."""

        def __init__(self, layer):
            self.heads, self._layer = layer.heads, layer

        def logit_factors(self, eta):
            return {name: factor.T for name, factor in self._layer.logit_factors(eta).items()}

    made = []

    def planted(config, axes, layers):
        made.append(config)
        return qk_clip(config, axes, layers if len(made) == 1 else {k: Wrong(v) for k, v in layers.items()})

    monkeypatch.setattr(rules, "qk_clip", planted)
    code, out, _ = run(capsys, *sides, **keys)
    assert (code, len(made)) == (1, 2)
    first = "differ first in updated parameters: decoder/layers/self_attention/key/kernel, layer 0"
    assert out.splitlines()[-1].endswith(first)


def planted_spikes(config):
    """Plants a spike bound that omits the mean."""
    rule = skip_spikes(config)

    def observe(state, seen):
        window = state._replace(loss=state.loss - state.loss.mean())
        return rule.observe(state, seen)[0], rule.observe(window, seen)[1]

    return rule._replace(observe=observe)


def planted_average(config):
    """Plants an average with a different decay."""
    return averaging(SimpleNamespace(**{**config, "ema_decay": 0.5}))


# Faults in an update: the keys of the run, where the fault is planted, and where it appears first. Faults that appear
# in LATER have no effect in a first update, whose moments are zero.
LATER = measure.LATER[0]
FAULTS = {
    "adamw": ({}, "adamw", {"adam_eps": 1e-4}, "updated parameters"),
    "nadamw": ({}, "nadamw", {"adam_b1": 0.8}, "updated parameters"),
    "adam_pax": ({}, "adam_pax", {"adam_weight_decay": 0.0}, "updated parameters"),
    "sgd": ({"sgd_momentum": 0.9}, "sgd", {"sgd_momentum": 0.5}, LATER),
    "muon": ({}, "muon", {"muon_consistent_rms": 0.2}, "updated parameters"),
    "lion": ({}, "lion", {"lion_b1": 0.5}, LATER),
    "adafactor": ({}, "adafactor", {"adafactor_decay_rate": 0.3}, LATER),
    "spikes": ({"skip_step_on_spikes": True}, "skip_spikes", planted_spikes, LATER),
    "average": ({"ema_decay": 0.9}, "averaging", planted_average, measure.LATER[1]),
}


@pytest.mark.rest(covered_by="adamw", cases=("adafactor", "adam_pax", "lion", "muon", "nadamw", "sgd"))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_an_update_is_named(capsys, monkeypatch, name):
    """The last side has the fault. Another test shows that sides without a fault are bit-identical."""
    assert FAULTS.keys() >= OPTIMIZERS.keys()
    settings, place, fault, quantity = FAULTS[name]
    of_optimizer = place in OPTIMIZERS
    right = OPTIMIZERS[place] if of_optimizer else getattr(rules, place)
    made = []

    def wrong(keys, *given):
        return right(SimpleNamespace(**vars(keys) | fault), *given) if of_optimizer else fault(keys)

    def planted(*args):
        made.append(args)
        return (wrong if len(made) == 2 else right)(*args)

    def no_model(*args):
        """Replaces `make_gradients` by gradients that need almost no compilation."""
        return lambda tree, batch, frozen: Gradients(
            jnp.ones(()), {"lm_loss": jnp.ones(())}, jnp.ones((), jnp.int32), {}, jax.tree.map(jnp.sin, tree.params)
        )

    monkeypatch.setattr(step, "make_gradients", no_model)
    monkeypatch.setattr(programs, "MEASURES", (measure.update,))
    if of_optimizer:
        monkeypatch.setitem(OPTIMIZERS, place, planted)
    else:
        monkeypatch.setattr(rules, place, planted)
    keys = {"opt_type": name if of_optimizer else "sgd", "base_num_decoder_layers": 1, "learning_rate": 0.1}
    words = (f"left={ALL_COMBINATIONS[0]}", f"right={ALL_COMBINATIONS[-1]}", "--json")
    code, out, err = run(capsys, *words, **keys | settings, warmup_steps_fraction=0)
    assert (code, len(made)) == (1, 2), out + err
    (faulty,) = json.loads(out)["comparisons"]
    assert faulty["first"].startswith(f"{quantity}: "), faulty["first"]


@pytest.mark.parametrize(
    ("method", "first"), [("forward", "loss: lm_loss"), ("backward", "gradients: decoder/decoder_norm/scale")]
)
def test_a_lost_tile_is_found(capsys, monkeypatch, method, first):
    """A forward fault changes the loss; a backward fault changes only gradients."""
    original = getattr(tiling._Tiled, f"_{method}")

    def losing(self, head, hidden, buffers, target, *grads):
        def lost(x):
            return x.at[-2:].set(0)  # two of eight rows: one of four tiles

        if method == "backward":
            return original(self, head, hidden, buffers, target, jax.tree.map(lost, *grads))
        return jax.tree.map(lost, original(self, head, hidden, buffers, target))

    monkeypatch.setattr(tiling._Tiled, f"_{method}", losing)
    monkeypatch.setattr(programs, "MEASURES", (measure.gradients,))
    code, out, _ = run(capsys, "right.num_vocab_tiling=4", "rtol=1e-5", base_num_decoder_layers=1)
    assert code == 1
    assert out.splitlines()[-1] == f"left and right differ first in {first}"


def test_other_logical_axes_are_a_difference(capsys, monkeypatch):
    """Only between programs of the same block: another block may name its axes differently."""
    built, original = [], building.build

    def build(config, devices):
        run = original(config, devices)
        if built:
            run.model.param_axes["decoder"]["layers"]["mlp"]["wo"]["kernel"] = Axes(("layers", "mlp", "norm"))
        built.append(run)
        return run

    monkeypatch.setattr(building, "build", build)
    monkeypatch.setattr(programs, "MEASURES", (measure.parameters,))
    said = "logical axes of decoder/layers/mlp/wo/kernel: [layers, mlp, embed] against [layers, mlp, norm]"
    for word, expected in (("right.scan_layers=false", 1), ("right.decoder_block=mistral", 0)):
        built.clear()
        code, out, _ = run(capsys, word)
        assert code == expected, out
        assert said in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["right.remat_policy=full"], 0),
        (["right.attention=blockwise", "rtol=1e-5"], 0),
        (["right.dtype=bfloat16"], 1),
        (["right.dtype=bfloat16", "rtol=0.05"], 0),
    ],
)
def test_sides_of_another_program(capsys, words, expected):
    code, out, _ = run(capsys, *words, only_forward=True)
    assert code == expected, out


@pytest.mark.rest(covered_by="a fault in the update of adamw, and sides of one program")
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


@pytest.mark.rest(covered_by="unit/state/test_stages.py; sides of one program")
def test_a_pipeline_is_compared_layer_by_layer(capsys):
    stages = ("left.per_device_batch_size=8", "right.ici_pipeline_parallelism=2", "right.per_device_batch_size=4")
    code, out, _ = run(capsys, *stages, "right.pipeline_parallel_layers=2", "rtol=1e-5", only_forward=True)
    assert code == 0
    assert next(line for line in out.splitlines() if line.startswith("parameters")).endswith("equal bits")
    assert out.splitlines()[-1] == "left and right are equal within rtol=1e-05"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to compare"),
        (["left=nnx", "rtol=-1"], "rtol=-1: must be a non-negative number"),
        (["left=nnx", "num_processes=1", "coordinator_address=localhost:1", "process_id=0"], "runs in one process"),
        (["right.grain_eval_files=x"], "grain_eval_files: different in left and right"),
        (["left.data_shuffle_seed=1"], "data_shuffle_seed: different in left and right"),
        (["left.attention=blokwise"], "nearest: blockwise"),
        (["right.ici_tensor_parallelism=16"], "error: right: "),
        (["right.ici_tensor_parallelism=16"], "but there are 8 devices"),
    ],
)
def test_mistakes_end_with_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_keys_that_mean_nothing_to_it_are_named(capsys, monkeypatch):
    monkeypatch.setattr(programs, "MEASURES", ())
    idle = ["compile_topology=v5e-8", "compiled_trainstep_file=x", "compile_report_file=y", "right.prompt=z"]
    code, _, err = run(capsys, *idle, "skip_jax_distributed_system=true", enable_checkpointing=True)
    assert code == 0
    (line,) = [line for line in err.splitlines() if "have no effect here" in line]
    assert line.partition(" have")[0].split(", ") == [
        "enable_checkpointing",
        "eval_interval",
        "skip_jax_distributed_system",
        "prompt",
        "compile_topology",
        "compiled_trainstep_file",
        "compile_report_file",
    ]


def test_help_needs_no_jax(capsys):
    parity.main(["--help"])
    assert "left.KEY=VALUE" in capsys.readouterr().out
