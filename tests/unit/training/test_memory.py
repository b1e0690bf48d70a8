"""A configuration that cannot fit is refused before it is traced."""

import types

import jax
import pytest

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.training import memory

WORDS = ["dataset_type=synthetic", "enable_checkpointing=false"]


def test_a_model_beyond_the_memory_is_refused_with_both_figures(monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 4_000_000_000)
    devices = jax.devices()[:1]
    config = load([*WORDS, "base_mlp_dim=2147483647"]).config
    share = 4_000_000_000 / len(jax.local_devices()[:1])
    assert memory.device_memory(devices) == share
    with pytest.raises(UserError, match=r"need at least 19\.8 TB on each of 1 device with 4\.00 GB"):
        memory.check_memory(config, devices, share)
    memory.check_memory(config, devices, share, margin=10_000)
    memory.check_memory(config, devices, None)
    memory.check_memory(load(WORDS).config, devices, share)


def test_memory_of_other_devices_is_what_they_say():
    def device(stats):
        return types.SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: stats)

    assert memory.device_memory([device({"bytes_limit": 7})]) == 7
    assert memory.device_memory([device(None)]) is None


def test_a_container_has_what_it_may_use(tmp_path, monkeypatch):
    for text, limit in (("max\n", None), ("123456\n", 123456)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "memory.max"), str(tmp_path / "absent")))
        assert (memory.host_memory() == limit) is (limit is not None)
