"""What must be installed to compile for GPUs on a machine without a GPU."""

import pytest
from jax.errors import JaxRuntimeError

from trainer.aot import gpus, topologies
from trainer.aot.chips import CHIPS
from trainer.config.errors import UserError
from trainer.config.topologies import GPUS, find_topology


def test_every_gpu_is_described_to_xla():
    assert set(gpus.TARGETS) == set(GPUS)
    for name, target in gpus.TARGETS.items():
        text = target.text(CHIPS[name])
        assert f'device_description_str: "{CHIPS[name].kinds[0]}"' in text
        assert f"device_memory_size: {CHIPS[name].hbm_bytes} " in text


def test_without_the_plugin_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(topologies, "plugin", lambda: None)
    with pytest.raises(
        UserError, match=r"compile_topology=h100-8 needs JAX's plugin .* pip install 'trainer\[gpu-aot\]'"
    ):
        topologies.devices_of(find_topology("h100-8"))


@pytest.mark.parametrize(
    ("plugin", "packages"),
    [
        ("jax_plugins.xla_cuda12", "nvidia-cuda-nvcc-cu12 nvidia-cudnn-cu12"),
        ("jax_plugins.xla_cuda13", "nvidia-cuda-nvcc nvidia-cudnn-cu13"),
        (None, "nvidia-cuda-nvcc-cu12 nvidia-cudnn-cu12"),
    ],
)
def test_an_absent_part_of_nvidias_software_is_named(monkeypatch, plugin, packages):
    monkeypatch.setattr(gpus, "plugin", lambda: plugin)
    for message, part in (("INTERNAL: cuDNN not found.", "cuDNN"), ("Couldn't find a version of ptxas", "ptxas")):
        with pytest.raises(UserError, match=f"cannot find {part}: pip install {packages} "), gpus.parts_present():
            raise JaxRuntimeError(message)
    with pytest.raises(JaxRuntimeError, match="ptxas"), gpus.parts_present():
        raise JaxRuntimeError("ptxas exited with non-zero error code")
