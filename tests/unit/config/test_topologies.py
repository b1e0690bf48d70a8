"""Topologies by name."""

import pytest

from trainer.config.capabilities.all_keys import step_keys
from trainer.config.dump import PROCESSES
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.topologies import GENERATIONS, GPUS, find_topology, topologies


def test_names_count_as_maxtext_counts():
    known = topologies()
    assert len([topology for topology in known.values() if topology.platform == "tpu"]) == 223
    cases = {
        "v4-8": ("2x2x1", 4),
        "v4-4096": ("8x16x16", 2048),
        "v5p-256": ("4x4x8", 128),
        "v5p-17920": ("16x20x28", 8960),
        "v5e-1": ("1x1", 1),
        "v5e-256": ("16x16", 256),
        "v6e-8": ("2x4", 8),
        "tpu7x-2": ("1x1x1", 2),
        "tpu7x-128": ("4x4x4", 128),
        "tpu7x-18432": ("16x24x24", 18432),
    }
    for name, (shape, devices) in cases.items():
        topology = known[name]
        assert ("x".join(map(str, topology.shape)), topology.devices, topology.platform) == (shape, devices, "tpu")
    assert {name.partition("-")[0] for name in known} == {*GENERATIONS, *GPUS}


def test_rings_close_where_the_network_does():
    wraps = {name: find_topology(name).wrap for name in ("v5e-64", "v6e-128", "v5e-256", "v5p-64", "v5p-128")}
    assert wraps == {
        "v5e-64": (False, False, False),
        "v6e-128": (False, True, False),
        "v5e-256": (True, True, False),
        "v5p-64": (False, False, False),
        "v5p-128": (True, True, True),
    }


def test_simulated_devices():
    topology = find_topology("cpu-8")
    assert (topology.platform, topology.devices, topology.generation) == ("cpu", 8, None)


@pytest.mark.parametrize("kind", GPUS)
def test_a_slice_of_gpus_is_one_host(kind):
    for count in (1, 2, 4, 8):
        topology = find_topology(f"{kind}-{count}")
        assert (topology.platform, topology.devices, topology.kind) == ("gpu", count, kind)
    hosts = f"give compile_topology={kind}-8 compile_topology_num_slices=5"
    assert find_topology(f"{kind}-33") == f"a slice of GPUs is one host, with at most 8; {hosts}"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("h100-3", "there is no slice h100-3; h100 has h100-1, h100-2, h100-4, h100-8; nearest: h100-4"),
        ("v5e-100", "v5e-128, v5e-256; nearest: v5e-128"),
        ("v5p-300", "; nearest: v5p-256"),
        ("tpu7x-1", "; nearest: tpu7x-2"),
        ("v5-16", "v6e-N, tpu7x-N, a100-N, h100-N, h200-N, b200-N, cpu-N; nearest: v5p-16"),
        ("a3", "is h100-8 here"),
        ("v5e-x", "v5e-128, v5e-256"),
        ("v5e-0", "v5e-128, v5e-256"),
        ("cpu-0", "such as cpu-8"),
    ],
)
def test_an_unknown_one_is_an_error_with_the_nearest(name, end):
    assert find_topology(name).endswith(end)
    with pytest.raises(UserError, match=f"""compile_topology="?{name}"? .command line."""):
        load([f"compile_topology={name}"])


def test_simulated_devices_lie_in_no_slices():
    with pytest.raises(UserError, match="simulated CPU devices have no slices: give cpu-N"):
        load(["compile_topology=cpu-4", "compile_topology_num_slices=2"])


def test_a_step_for_gpus_is_not_saved():
    with pytest.raises(UserError, match="compiled ahead of time for GPUs is not saved: loading such a step"):
        load(["compile_topology=h100-8", "compiled_trainstep_file=step"])
    load(["compile_topology=h100-8"])


def test_which_keys_make_the_step():
    keys = set(step_keys())
    inside = {
        "base_mlp_dim",
        "scan_layers",
        "learning_rate_schedule_steps",
        "max_target_length",
        "per_device_batch_size",
    }
    assert inside | {"record_internal_nn_metrics", "ici_fsdp_parallelism", "mu_dtype", "attention"} <= keys
    outside = {"run_name", "steps", "eval_interval", "dataset_type", "checkpoint_period", "compile_topology", "prompt"}
    outside |= set(PROCESSES)
    assert not keys & (outside | {"compiled_trainstep_file", "load_parameters_path", "eval_per_device_batch_size"})
