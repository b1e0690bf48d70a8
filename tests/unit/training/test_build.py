"""What `build` makes of a configuration, and which configurations it refuses for the given devices."""

import re
from types import SimpleNamespace

import jax
import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.training.build import build


def test_offloading_needs_pinned_host_memory():
    device = SimpleNamespace(platform="gpu", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    config = load(arguments("nnx", remat_policy="minimal_offloaded")).config
    with pytest.raises(UserError, match=r"remat_policy=minimal_offloaded: these devices have no pinned_host memory"):
        build(config, [device])


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_step_on_leaves_is_the_same_program(combination):
    run = build(load(arguments(combination)).config, jax.devices()[:1])
    state, *others = run.abstract_args()
    lowered = run.step_on_leaves.lower(jax.tree.leaves(state), *others), run.step.lower(state, *others)
    ours, native = (re.sub('jax.result_info = "[^"]*"', "", program.as_text()) for program in lowered)
    assert ours == native
