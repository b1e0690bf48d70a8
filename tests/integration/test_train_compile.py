"""`python -m trainer.train_compile` as a user runs it, and `trainer.train` with its output."""

import json
import math
import os
import re
import subprocess
import sys

import jax
import pytest
from compiler import TINY_TPU as TPU
from compiler import TPU_QUICKLY, needs_libtpu, xla_flags
from support import ALL_COMBINATIONS, arguments, lowered_update

from trainer.aot.buffers import STATE
from trainer.aot.text import report_text
from trainer.aot.topologies import devices_of, topology_of
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.ops.paths import by_name
from trainer.train import main
from trainer.train_compile import compile_for_topology
from trainer.train_compile import main as compile_main
from trainer.training.build import build
from trainer.training.run import Run

STEPS = {"steps": 6, "eval_interval": 3, "eval_steps": 1, "per_device_batch_size": 1, "ici_fsdp_parallelism": 8}


def train_compile(*args, cwd, flags=""):
    env = os.environ | {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": ""}  # disables the cache
    command = [sys.executable, "-m", "trainer.train_compile", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def losses(folder, *args):
    main(arguments("nnx", **STEPS, base_output_directory=folder, prompt="", **dict(args)))
    rows = [json.loads(line) for line in (folder / "run-0001" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss"), row.get("eval_loss")) for row in rows]


@pytest.mark.rest(covered_by="unit/aot/test_executable.py")
def test_train_takes_the_step_that_another_process_compiled(tmp_path, monkeypatch, capsys):
    step, report = tmp_path / "step", tmp_path / "below" / "report.json"
    written = {"compile_topology": "cpu-8", "compiled_trainstep_file": step, "compile_report_file": report}
    # Compiled with this process's options, because losses are compared bit by bit.
    done = train_compile(*arguments("nnx", **STEPS, **written), cwd=tmp_path, flags=xla_flags(8))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cpu-8: 8 x cpu, fsdp 8\n")
    assert done.stdout.endswith(f"wrote {step}\n")
    assert json.loads(report.read_text())["topology"] == "cpu-8"

    expected = losses(tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "trace_on_leaves", lambda run, rows=None: pytest.fail("compiled"))
        assert losses(tmp_path / "loaded", ("compiled_trainstep_file", step)) == expected
    assert [(number, bool(loss)) for number, loss, _ in expected].count((2, False)) == 1  # with an evaluation
    assert f"loaded the training step from {step}; nothing is compiled" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        losses(tmp_path / "other", ("compiled_trainstep_file", step), ("learning_rate", 0.5))
    assert "learning_rate: 0.006 -> 0.5" in capsys.readouterr().err
    assert not (tmp_path / "other" / "run-0001" / "config.yml").exists()


def test_no_topology_and_no_libtpu(monkeypatch, capsys):
    with pytest.raises(SystemExit) as exited:
        compile_main(arguments("nnx"))
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: compile_topology is empty: give the devices to compile for, such as v5e-16")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"compile_topology=v5p-8 needs libtpu, .* pip install 'trainer\[tpu-aot\]'"):
        compile_for_topology(load(arguments("nnx", compile_topology="v5p-8")).config)


@needs_libtpu
def test_a_step_that_does_not_fit_is_a_report(tmp_path):
    large = TPU | {"per_device_batch_size": 4096, "vocab_size": 32000, "compile_report_file": "report.json"}
    done = train_compile(*arguments("nnx", **large), cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 3
    assert done.stderr.startswith("error: does not fit: it needs ")
    assert len(done.stderr.splitlines()) == 1  # libtpu's output is suppressed
    assert not report["fits"]
    assert report["missing_bytes"] == report["peak_bytes"] - report["hbm_bytes"] > 0
    assert report["largest_buffers"][0]["shape"].endswith("[4096,256,32000]")
    settings = [suggestion["settings"] for suggestion in report["suggestions"]]
    assert "per_device_batch_size=2048" in settings
    assert "compile_topology=v5e-8 ici_fsdp_parallelism=8" in settings


@needs_libtpu
@pytest.mark.parametrize("size", ["base_emb_dim", "base_mlp_dim", "vocab_size"])
def test_a_step_out_of_all_proportion_is_not_compiled(size):
    """libtpu would take minutes to compile it."""
    sizes = {"base_emb_dim": 512, size: 2147483640}
    config = load(arguments("nnx", compile_topology="v5e-8", ici_fsdp_parallelism=8, **sizes)).config
    with pytest.raises(UserError, match=r"at least .* on each of 8 devices with 16\.9 GB"):
        compile_for_topology(config)


@pytest.mark.rest(covered_by="the same program on CPU devices")
@needs_libtpu
def test_the_step_of_every_train_state_is_the_same_program_for_a_tpu():
    """As on CPUs (test_five_combinations.py), but with the fused kernel. So the tests below compile only one."""

    def text(combination):
        config = load(arguments(combination, **TPU)).config
        run = build(config, devices_of(topology_of(config)))
        return lowered_update(run).as_text()

    expected = text(ALL_COMBINATIONS[0])
    assert "tpu_custom_call" in expected
    for combination in ALL_COMBINATIONS[1:]:
        assert text(combination) == expected, combination


# Unique axis sizes, so that no activation is as large as a weight: three rows of two heads would be as large as a
# weight with three.
HEADS = {"base_num_query_heads": 9, "base_num_kv_heads": 3}


@pytest.fixture(scope="module")
def on_two_slices():
    """Returns the run, compiled step and report for two slices of four chips."""
    sizes = {"per_device_batch_size": 3, "max_target_length": 128, "opt_type": "sgd", **HEADS}
    slices = {"compile_topology_num_slices": 2, "dcn_data_parallelism": 2}
    config = load(arguments("nnx", **TPU | sizes | slices)).config
    return compile_for_topology(config, TPU_QUICKLY)


@needs_libtpu
def test_the_step_compiles_for_a_tpu(on_two_slices):
    """The program has a fused kernel, and no bfloat16 copy of all layers."""
    run, compiled, report = on_two_slices
    assert (run.config.dtype, run.config.attention) == ("bfloat16", "splash")
    assert (report.devices, dict(report.mesh), report.fits) == (8, {"data": 2, "fsdp": 4}, True)
    assert {collective.slices for collective in report.cost.collectives} == {1, 2}
    time = report.estimate
    assert time.dcn_seconds > 0
    assert time.seconds <= time.scheduled_seconds <= time.serial_seconds
    assert 0 < time.exposed_network_seconds <= time.ici_seconds + time.dcn_seconds
    memory = report.memory
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    # The report recognizes a copy of the state by the prefixes of the argument names.
    entry = compiled.as_text().partition("\nENTRY ")[2]
    named = re.findall(r" parameter\(\d+\),.*op_name=\"([^\"]*)\"", entry)
    assert sum(name.startswith(STATE) for name in named) == len(jax.tree.leaves(run.abstract_args()[0]))
    assert report.gradients_reduced_in == ["bf16", "f32"]  # regardless of grad_dtype, as the report must state
    reduced = [line.strip() for line in report_text(report).splitlines() if "gradients are reduced" in line]
    assert reduced == [
        "gradients are reduced in bf16 and f32; bf16 instead of grad_dtype=float32 where their operands are in bf16"
    ]
    assert "tpu_custom_call" in compiled.as_text()
    assert "f32[3,64,512]" in compiled.as_text()  # wi_0 and wi_1 of all layers, sharded
    assert "bf16[3,64,512]" not in compiled.as_text()


@needs_libtpu
def test_a_tpu_neither_pads_gradients_nor_copies_heads_into_another_order(on_two_slices):
    """64 columns would be padded to 128, so the gradients of wo are stored transposed, like the weights.

    The attention kernel reads and writes arrays with heads first, and products with weights use the same order. The
    only exception is the query gradient, which the kernel returns in float32: the compiler transposes it for RoPE.
    """
    text = on_two_slices[1].as_text()
    assert "f32[3,512,64]{1,2,0" in text
    padded = re.findall(r"f32\[3,512,64\]\{2,1,0[^}]*", text)
    assert [layout for layout in padded if "S(1)" not in layout] == []  # S(1): in VMEM, not in HBM
    found = re.findall(r"= bf16\[([\d,]+)\]\S* copy\(", text)
    copies = [tuple(map(int, dims.split(","))) for dims in found]
    for count in HEADS.values():
        assert f"bf16[3,{count},128,128]" in text
        assert [dims for dims in copies if math.prod(dims) == 3 * 128 * count * 128] == []


@pytest.mark.rest(covered_by="unit/training/test_streaming_diloco.py counts their traffic")
@needs_libtpu
def test_islands_on_two_slices_send_between_them_only_to_synchronize():
    sizes = {"base_num_decoder_layers": 1, "attention": "dot_product", "per_device_batch_size": 1, "vocab_size": 128}
    slices = {"compile_topology_num_slices": 2, "enable_diloco": True, "dcn_diloco_parallelism": 2}
    config = load(arguments("nnx", **TPU | sizes | slices)).config
    run, _, report = compile_for_topology(config, TPU_QUICKLY)
    assert dict(report.mesh) == {"diloco": 2, "fsdp": 4}
    across = [it for it in report.cost.collectives if it.slices == 2]
    assert across
    assert all(it.conditional for it in across)
    assert {it.slices for it in report.cost.collectives if "diloco" not in it.axes} == {1}
    parameters = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(run.codec.unpack(run.abstract_args()[0]).params)
    )
    assert sum(it.size * it.count for it in across if it.size > 64) == pytest.approx(4 * parameters, rel=0.02)


@pytest.mark.rest(covered_by="the products in the jaxpr")
@needs_libtpu
def test_a_tpu_multiplies_the_integers_that_it_gathers():
    """Products in all layers have int8 operands, and devices all-gather the weights as int8."""
    keys = {"base_num_decoder_layers": 2, "remat_policy": "none", "quantization": "int8"}
    config = load(arguments("nnx", **TPU | keys)).config
    run, _, report = compile_for_topology(config, TPU_QUICKLY)
    # Each layer matrix has three products with the tokens of a device.
    layers = [leaf.size for name, leaf in by_name(run.model.abstract[0]).items() if name.endswith("kernel")]
    tokens = config.max_target_length
    assert report.cost.matmul_flops["s8"] == pytest.approx(3 * 2 * tokens * sum(layers), rel=0.01)
    gathered = {each.dtype for each in report.cost.collectives if each.kind in ("all-gather", "collective-permute")}
    assert "s8" in gathered
