"""The report of a compilation, for JSON and for people."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from trainer.aot.chips import CHIPS, FRACTIONS
from trainer.aot.collectives import Collective
from trainer.aot.dump import Dump
from trainer.aot.report import make_report
from trainer.aot.roofline import Estimate
from trainer.aot.text import report_text, verdict

GIB = 1024**3
MESSAGE = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (20.00G) exceeds available HBM (15.75G). HLO module: jit_step."
)


@pytest.fixture(scope="module")
def report(step):
    return make_report(step.run, step.compiled, "", step.texts, (0.5, 1.25), 1)


def test_json_has_the_bytes_of_a_device(step, report):
    stats = step.compiled.memory_analysis()
    values = json.loads(json.dumps(report.as_dict()))
    assert values["argument_bytes"] == stats.argument_size_in_bytes
    assert values["output_bytes"] == stats.output_size_in_bytes
    assert values["alias_bytes"] == stats.alias_size_in_bytes > 0.9 * stats.output_size_in_bytes
    assert values["temp_bytes"] == stats.temp_size_in_bytes
    assert values["peak_bytes"] >= values["temp_bytes"] + values["argument_bytes"]
    assert (values["hbm_bytes"], values["fits"], values["estimate"]) == (None, None, None)
    assert (values["trace_seconds"], values["compile_seconds"]) == (0.5, 1.25)
    assert values["mesh"] == {"data": 2, "fsdp": 4}
    analysis = step.compiled.cost_analysis()
    assert (values["rolled_flops"], values["rolled_bytes_accessed"]) == (analysis["flops"], analysis["bytes accessed"])
    assert (values["grad_dtype"], values["gradients_reduced_in"]) == ("float32", ["f32"])
    assert values["flops"] > 1.5 * values["rolled_flops"]  # three layers


def test_the_breakdown_adds_up(report):
    values = report.as_dict()
    parts = values["breakdown"]
    state = parts["parameters"] + parts["optimizer"] + parts["other state"] + parts["batch"]
    assert state == pytest.approx(values["argument_bytes"], rel=0.01)
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    assert parts["gradients"] > 0
    temporaries = sum(parts[kind] for kind in ("gradients", "saved for the backward pass", "other temporaries"))
    assert 0.5 * values["temp_bytes"] < temporaries <= values["temp_bytes"]


def test_people_read_all_of_it(report):
    text = report_text(report)
    assert text.startswith(": 8 x cpu, data 2 x fsdp 4\ntraced in 500 ms, compiled in 1.25 s\n\ntakes ")
    assert "layers/loop.py:" in text
    assert "all-gather f32 along fsdp" in text
    assert max(map(len, text.splitlines())) < 160
    assert "gradients are reduced in f32\n" in text + "\n"
    elsewhere = report_text(dataclasses.replace(report, grad_dtype="bfloat16"))
    assert "in f32; f32 instead of grad_dtype=bfloat16 where their operands are in f32" in elsewhere


def test_gradients_that_a_ring_sums_are_reduced_too(report):
    ring = Collective("collective-permute", True, "bf16", ("fsdp",), 4, 1, 2048, 4, 8192, ("transpose(jvp())/dot",))
    operands = dataclasses.replace(ring, sums=False, dtype="f16")
    cost = dataclasses.replace(report.cost, collectives=(*report.cost.collectives, ring, operands))
    summed = dataclasses.replace(report, cost=cost)
    assert summed.gradients_reduced_in == ["bf16", "f32"]
    text = report_text(summed)
    assert "gradients are reduced in bf16 and f32; bf16 instead of grad_dtype=float32" in text
    assert "collective-permute bf16 along fsdp, 4 x 2.05 kB, partial sums\n" in text


def test_the_peak_includes_all_temporaries(step):
    """For small programs, libtpu reports a peak below the size of their temporaries."""

    class Stats:
        argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes = 100, 90, 80
        temp_size_in_bytes, peak_memory_in_bytes = 700, 345
        generated_code_size_in_bytes = host_argument_size_in_bytes = host_temp_size_in_bytes = 0

    class Compiled:
        memory_analysis = Stats
        cost_analysis = dict

    memory = make_report(step.run, Compiled, "", step.texts, (0.0, 0.0), 1).memory
    assert memory.peak == 100 + (90 - 80) + 700


def test_the_estimate_of_a_loop_of_unknown_length_is_a_lower_bound(step, monkeypatch):
    """Every loop of the scanned step has a known length, until the test removes the lengths from the program's text."""
    monkeypatch.setattr("trainer.aot.report.chip_of", lambda kind: CHIPS["v5e"])
    known = make_report(step.run, step.compiled, "", step.texts, (0.0, 0.0), 1)
    times = known.as_dict()["estimate"]
    assert times["seconds"] <= times["scheduled_seconds"] <= times["serial_seconds"]
    hidden = step.texts.optimized.replace("known_trip_count", "hidden").replace("direction=LT", "direction=NE")
    unknown = make_report(step.run, step.compiled, "", step.texts._replace(optimized=hidden), (0.0, 0.0), 1)
    assert (times["lower_bound"], unknown.as_dict()["estimate"]["lower_bound"]) == (False, True)
    text = report_text(unknown)
    assert "a step, per device: at least " in text
    assert text.splitlines()[-1] == "  lower bound: the trip count of a loop is unknown; one iteration is counted"
    assert "lower bound" not in report_text(known)


def test_the_times_can_be_read_aloud(report):
    time = Estimate(0.555, 0.66, 1.04, 0.555, 0.287, 0.203, 0.203, 0, 0.012, 0.008, 0.004, "compute", False)
    assert report_text(dataclasses.replace(report, estimate=time)).splitlines()[-3:] == [
        "estimate: 660 ms per step as the compiler scheduled it; of these the device waits 8 ms for the network and "
        "4 ms for the host",
        "  at least 555 ms, bound by compute (compute 555 ms, memory 287 ms, network 203 ms, host 12 ms)",
        "  1.04 s if nothing overlaps",
    ]
    alone = time._replace(host_seconds=0, exposed_host_seconds=0, exposed_network_seconds=0)
    assert report_text(dataclasses.replace(report, estimate=alone)).splitlines()[-3:-1] == [
        "estimate: 660 ms per step as the compiler scheduled it",
        "  at least 555 ms, bound by compute (compute 555 ms, memory 287 ms, network 203 ms)",
    ]


def test_a_step_that_does_not_fit(step, monkeypatch):
    monkeypatch.setattr("trainer.aot.report.chip_of", lambda kind: CHIPS["v5e"])
    monkeypatch.setattr("trainer.aot.report.estimate", lambda *args: None)
    texts = step.texts._replace(assignment="", live_range="")
    failed = make_report(step.run, None, MESSAGE, texts, (0.0, 0.0), 1)
    assert (failed.fits, failed.memory.temporaries) == (False, 20 * GIB)
    assert failed.memory.peak == 20 * GIB + failed.memory.arguments
    assert (
        verdict(failed) == "does not fit: it needs 20.00 GiB on each device, 4.25 GiB more than the available 15.75 GiB"
    )
    assert failed.as_dict()["missing_bytes"] == failed.memory.peak - failed.hbm_bytes
    assignment = f"allocation 7: size {17 * GIB}, page 0, preallocated-temp:\nallocation 8: size 9, color 2, page 0, x"
    laid_out = make_report(step.run, None, MESSAGE, Dump(*texts)._replace(assignment=assignment), (0.0, 0.0), 1)
    assert laid_out.memory.temporaries == 17 * GIB
    assert failed.cost.rolled_flops == failed.rolled_flops


def test_a_gpu_has_a_fraction_of_its_memory(step, monkeypatch):
    monkeypatch.setattr("trainer.aot.report.chip_of", lambda kind: CHIPS["h100"])
    for name in FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    fits = make_report(step.run, step.compiled, "", step.texts, (0.0, 0.0), 1)
    assert (fits.fits, fits.fraction, fits.rematerialized) == (True, 0.75, 0)
    assert "  available is 0.75 of a GPU's 79.11 GiB, which XLA_CLIENT_MEM_FRACTION sets\n" in report_text(fits)
    large = dataclasses.replace(fits, fits=False, memory=dataclasses.replace(fits.memory, peak=70 * GIB))
    assert verdict(large) == (
        "does not fit: it needs 70.00 GiB on each device, 10.67 GiB more than the available 59.33 GiB; with "
        "XLA_CLIENT_MEM_FRACTION=0.89 it fits"
    )
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")  # the report names the variable that is set
    assert verdict(large).endswith("with XLA_PYTHON_CLIENT_MEM_FRACTION=0.89 it fits")
    assert "GiB, which XLA_PYTHON_CLIENT_MEM_FRACTION sets\n" in report_text(fits)
    assert large.as_dict()["fitting_fraction"] == 0.89
    larger = dataclasses.replace(large, memory=dataclasses.replace(fits.memory, peak=76 * GIB))
    assert larger.fitting_fraction is None
    assert verdict(larger).endswith("the available 59.33 GiB")


def test_the_guide_lists_every_field_of_the_json_report(report):
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "ahead-of-time.md").read_text()
    listed = guide.split("`compile_report_file=PATH` writes")[1].split("\n\n")[1]
    assert set(re.findall(r"`(\w+)`", listed)) - {"cost_analysis"} == set(report.as_dict())


def test_what_xla_computes_again_is_said(step):
    again = step.texts.optimized.replace(
        "ENTRY ", "%more (x: f32[]) -> f32[] {\n  %add.1.remat2 = f32[] add()\n}\n\nENTRY "
    )
    report = make_report(step.run, step.compiled, "", step.texts._replace(optimized=again), (0.0, 0.0), 1)
    assert report.rematerialized == 1
    assert "  XLA recomputes 1 value to save memory" in report_text(report)
