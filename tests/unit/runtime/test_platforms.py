"""The platforms that JAX starts when libtpu is installed and there is no TPU."""

import importlib.util
import os
import sys

import jax
import pytest

from trainer.runtime import platforms


@pytest.fixture
def machine(monkeypatch):
    """Returns JAX_PLATFORMS on a simulated machine with these packages, JAX plugins and hardware."""

    def platforms_on(libtpu=True, plugins=(), devices=(), tpu=False, before=None):
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if before is not None:
            monkeypatch.setenv("JAX_PLATFORMS", before)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if libtpu else None)
        monkeypatch.setattr(platforms, "_plugins", lambda: set(plugins))
        monkeypatch.setattr(platforms.Path, "exists", lambda path: str(path) in devices)
        monkeypatch.setattr(platforms, "has_tpu", lambda: tpu)
        platforms.leave_out_absent_tpu()
        return os.environ.get("JAX_PLATFORMS")

    return platforms_on


def test_without_libtpu_nothing_is_said(machine):
    assert machine(libtpu=False) is None
    assert machine(libtpu=False, plugins=["xla_cuda12"], devices=["/dev/nvidiactl"]) is None
    assert machine(libtpu=False, plugins=["xla_cuda12"], devices=["/dev/dxg"]) is None


def test_a_plugin_for_gpus_is_not_started_without_a_gpu(machine):
    assert machine(libtpu=False, plugins=["xla_cuda13"]) == "cpu"
    assert machine(libtpu=False, plugins=["xla_cuda12", "metal"]) is None


def test_libtpu_is_not_started_without_a_tpu(machine):
    assert machine() == "cpu"
    assert machine(tpu=True) is None
    assert machine(before="tpu,cpu") == "tpu,cpu"


def test_a_gpu_is_found_all_the_same(machine):
    assert machine(plugins=["xla_cuda12"], devices=["/dev/nvidiactl"]) == "cuda,cpu"
    assert machine(plugins=["xla_rocm7"], devices=["/dev/kfd"]) == "rocm,cpu"
    assert machine(plugins=["xla_cuda12"]) == "cpu"
    assert machine(plugins=["metal"]) is None


def test_variables_of_the_user_stay(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    monkeypatch.setattr(os, "environ", os.environ | {"JAX_PLATFORMS": "tpu"})
    platforms.prepare_compile_only_tpu()
    assert (os.environ["TPU_WORKER_HOSTNAMES"], os.environ["TPU_WORKER_ID"]) == ("mine", "0")
    assert os.environ["JAX_PLATFORMS"] == "cpu"  # nothing runs on a TPU


@pytest.mark.parametrize(
    ("flags", "before", "threads"),
    [
        ("--xla_force_host_platform_device_count=4 --xla_force_host_platform_device_count=800 --x=1", None, "3200"),
        ("--xla_force_host_platform_device_count=8", "5", "5"),
        ("", None, None),
    ],
)
def test_simulated_devices_have_threads_to_wait_in(monkeypatch, flags, before, threads):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    if before:
        monkeypatch.setenv("NPROC", before)
    platforms.add_threads_for_simulated_devices()
    assert os.environ.get("NPROC") == threads


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_xla_takes_the_number_of_its_threads_from_nproc():
    """conftest.py starts XLA with as many threads as the function above returns."""
    jax.devices()
    assert len(os.listdir("/proc/self/task")) > platforms._THREADS_PER_DEVICE * 8
