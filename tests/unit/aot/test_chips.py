"""The table of chips and the roofline."""

import dataclasses

import pytest
from jaxlib import xla_client

from trainer.aot.chips import CHIPS, FRACTIONS, GIB, chip_of
from trainer.aot.collectives import Collective
from trainer.aot.cost import Cost
from trainer.aot.roofline import estimate
from trainer.config.errors import UserError
from trainer.config.topologies import GENERATIONS, GPUS

V5E = CHIPS["v5e"]


def cost(flops=0.0, hbm=0.0, collectives=(), dtype="bf16", host=0.0):
    return Cost(flops, {dtype: flops}, 0.0, 2 * hbm, hbm, flops, hbm, tuple(collectives), (), host_bytes=host)


def collective(kind="all-gather", devices=16, slices=1, size=16_000, count=10, moved=150_000.0):
    return Collective(kind, kind == "all-reduce", "bf16", ("fsdp",), devices, slices, size, count, moved, ())


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_in_a_plausible_range(name):
    chip = CHIPS[name]
    assert chip.name == name
    assert 15e9 < chip.hbm_bytes < 200e9
    assert 0.5e12 < chip.hbm_bandwidth < 10e12
    assert chip.flops("bf16") <= max(chip.peak.values())
    assert chip.flops("f32") == chip.flops("bf16") / (2 if chip.pool else 1)
    assert chip.dcn_bandwidth < chip.ici_bandwidth < chip.hbm_bandwidth
    assert all(chip_of(kind) is chip for kind in chip.kinds)


# As published, in the publisher's units, per chip: TFLOP/s of bf16, of int8 (tpu7x: fp8), HBM in GB, GB/s of HBM, GB/s
# of ICI in both directions together, Gbit/s of the data center network, and GB/s of PCIe in one direction (of tpu7x:
# v6e's). The sources are in aot/chips.py.
PUBLISHED = {
    "v4": (275, 275, 32, 1200, 600, 50, 16),
    "v5e": (197, 393, 16, 819, 400, 2 * 100 / 8, 16),
    "v5p": (459, 918, 95, 2765, 1200, 50, 16),
    "v6e": (918, 1836, 32, 1638, 800, 4 * 200 / 8, 32),
    "tpu7x": (2307, 4614, 192, 7380, 1200, 100, 32),
}
TORI = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}


@pytest.mark.parametrize("name", PUBLISHED)
def test_figures_are_the_published_ones(name):
    chip = CHIPS[name]
    bf16, narrow, capacity, hbm, ici, network, host = PUBLISHED[name]
    assert chip.peak["bf16"] == bf16 * 1e12
    assert {flops for dtype, flops in chip.peak.items() if dtype != "bf16"} == {narrow * 1e12}
    assert chip.hbm_bandwidth == hbm * 1e9
    assert chip.ici_bandwidth == ici * 1e9 / 2
    assert chip.dcn_bandwidth == network * 1e9 / 8
    assert chip.host_bandwidth == host * 1e9
    assert chip.torus == TORI[name] == len(GENERATIONS[name].shapes[0].split("x"))
    assert chip.devices == GENERATIONS[name].devices_per_chip
    # libtpu provides up to 3 % less than the physical memory; a published "GB" is a GiB, and v5p has 96 instead of 95.
    assert 0.97 * capacity < chip.hbm_bytes * chip.devices / GIB <= 1.01 * capacity


# As in NVIDIA's data sheets, of one GPU: TFLOP/s of bf16, of int8 or fp8, both with sparsity, memory in GB (for the
# H200 and the B200, the usable part of 141 GB and of 180 GB or more), GB/s of memory, of NVLink in both directions, and
# Gbit/s of network in the maker's server of eight; and the gigatransfers per second of a PCIe lane.
GPUS_PUBLISHED = {
    "a100": (624, 1248, 80, 2039, 600, 200, 16),
    "h100": (1978, 3958, 80, 3350, 900, 400, 32),
    "h200": (1978, 3958, 141, 4800, 900, 400, 32),
    "b200": (4500, 9000, 180, 8000, 1800, 400, 32),
}


@pytest.mark.parametrize("name", GPUS)
def test_figures_of_gpus_are_the_published_ones(name):
    chip = CHIPS[name]
    bf16, narrow, capacity, bandwidth, nvlink, network, lane = GPUS_PUBLISHED[name]
    assert chip.peak["bf16"] == bf16 * 1e12 / 2
    assert {chip.peak[dtype] for dtype in chip.peak if dtype.startswith(("s8", "f8"))} == {narrow * 1e12 / 2}
    assert chip.hbm_bandwidth == bandwidth * 1e9
    assert chip.ici_bandwidth == nvlink * 1e9 / 2
    assert chip.dcn_bandwidth == network * 1e9 / 8
    assert chip.host_bandwidth == pytest.approx(16 * lane * 1e9 * 128 / 130 / 8, rel=1e-3)
    assert (chip.torus, chip.devices, chip.pool) == (1, 1, True)
    assert 0.98 * capacity < chip.hbm_bytes / 1e9 < 1.07 * capacity


@pytest.mark.parametrize("name", FRACTIONS)
def test_jax_takes_a_fraction_of_a_gpus_memory(name, monkeypatch):
    for each in FRACTIONS:
        monkeypatch.delenv(each, raising=False)
    assert CHIPS["h100"].usable == int(0.75 * CHIPS["h100"].hbm_bytes)
    assert V5E.usable == V5E.hbm_bytes
    monkeypatch.setenv(name, ".9")
    assert CHIPS["h100"].usable == int(0.9 * CHIPS["h100"].hbm_bytes)
    for wrong in ("most", "0", "1.5", "nan"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(UserError, match=f"^{name}={wrong}: not a number above 0 and at most 1"):
            _ = CHIPS["h100"].usable


def test_two_variables_for_the_fraction_are_an_error_as_in_jaxlib(monkeypatch):
    for name in FRACTIONS:
        monkeypatch.setenv(name, "0.9")
    with pytest.raises(ValueError, match=" is specified together with ".join(FRACTIONS)):
        xla_client.generate_pjrt_gpu_plugin_options()
    with pytest.raises(UserError, match=f"^{' and '.join(FRACTIONS)} are both set: unset {FRACTIONS[1]}"):
        _ = CHIPS["h100"].usable
    monkeypatch.setenv(FRACTIONS[1], "")
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.9
    assert CHIPS["h100"].usable == int(0.9 * CHIPS["h100"].hbm_bytes)


def test_a_cpu_is_no_chip():
    assert chip_of("cpu") is None


def test_each_part_can_be_the_bound():
    compute = estimate(cost(flops=197e12), V5E, devices=16)
    assert (compute.bound, compute.seconds, compute.memory_seconds) == ("compute", 1, 0)
    memory = estimate(cost(flops=197e11, hbm=819e9), V5E, devices=16)
    assert (memory.bound, memory.seconds, memory.compute_seconds) == ("memory", 1, 0.1)
    network = estimate(cost(hbm=1, collectives=[collective(moved=200e9)]), V5E, devices=16)
    assert (network.bound, network.seconds) == ("network", 1)
    assert network.serial_seconds == pytest.approx(1 + 1 / 819e9)
    assert network.exposed_network_seconds == 1  # without a schedule, all of it is exposed
    host = estimate(cost(flops=197e11, host=16e9), V5E, devices=16)
    assert (host.bound, host.seconds, host.host_seconds, host.serial_seconds) == ("host", 1, 1, 1.1)


def test_integers_are_faster_where_the_table_says_so():
    assert estimate(cost(flops=393e12, dtype="s8"), V5E, devices=1).compute_seconds == 1


def test_a_part_of_a_slice_uses_one_dimension_of_the_torus():
    whole, half = (estimate(cost(collectives=[collective()]), V5E, devices=n).ici_seconds for n in (16, 32))
    assert half == 2 * whole == 150_000 / 100e9


def test_devices_of_one_chip_share_it():
    chip = CHIPS["tpu7x"]
    shared = estimate(cost(flops=2307e12, hbm=7.38e12, collectives=[collective(moved=600e9)]), chip, devices=16)
    assert (shared.compute_seconds, shared.memory_seconds, shared.ici_seconds) == (2, 2, 2)


def test_between_slices_each_device_sends_its_share():
    """16 devices on 2 slices: the 8 devices of a slice exchange 7/8 of the array; then an eighth goes to the other
    slice."""
    gather = estimate(cost(collectives=[collective(slices=2)]), V5E, devices=16, slices=2)
    assert gather.ici_seconds == pytest.approx(10 * 16_000 * 7 / 8 / 200e9)
    assert gather.dcn_seconds == pytest.approx(10 * 16_000 / 8 / 2 / 3.125e9)
    reduce = estimate(cost(collectives=[collective("all-reduce", 2, 2, moved=160_000.0)]), V5E, devices=16, slices=2)
    assert (reduce.ici_seconds, reduce.dcn_seconds) == (0, pytest.approx(160_000 / 3.125e9))
    permute = estimate(cost(collectives=[collective("collective-permute", slices=2)]), V5E, devices=16, slices=2)
    assert (permute.ici_seconds, permute.dcn_seconds) == (0, pytest.approx(150_000 / 3.125e9))


def test_what_is_not_in_every_step_takes_no_time():
    rare = dataclasses.replace(collective(), conditional=True)
    assert estimate(cost(collectives=[rare]), V5E, 16, 1).network_seconds == 0
