"""What `build` refuses once it sees the devices."""

from types import SimpleNamespace

import pytest
from support import arguments

from trainer.config import UserError, load
from trainer.training import build


def test_offloading_needs_pinned_host_memory():
    device = SimpleNamespace(platform="gpu", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    config = load(arguments("nnx", remat_policy="minimal_offloaded")).config
    with pytest.raises(UserError, match=r"remat_policy=minimal_offloaded: these devices have no pinned_host memory"):
        build(config, [device])
