"""Which platforms JAX starts where libtpu is installed and there is no TPU."""

import importlib.util
import os

import pytest

from trainer.runtime import platforms


@pytest.fixture
def machine(monkeypatch):
    """A machine with these packages, JAX plugins and hardware; what JAX_PLATFORMS becomes on it."""

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
    assert os.environ["JAX_PLATFORMS"] == "cpu"  # nothing runs
