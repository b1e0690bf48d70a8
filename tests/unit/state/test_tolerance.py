"""sharding_tolerance: which parameters count as replicated over a mesh axis that could shard them."""

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.config.errors import UserError
from trainer.sharding import Axes
from trainer.state.shardings import Tensor
from trainer.state.tolerance import check_tolerance

MESH = AbstractMesh((2, 8, 4, 1), ("data", "fsdp", "tensor", "stage"))


def check(tolerance=0.0, **parameters):
    """Runs `check_tolerance` on parameters given as name=(shape, spec)."""
    tensors, abstract, shardings = {}, {}, {}
    for name, (shape, spec) in parameters.items():
        tensors[name] = Tensor(("params", name), Axes(("x",) * len(shape)), True)
        abstract[name] = jax.ShapeDtypeStruct(shape, "float32")
        shardings[name] = NamedSharding(MESH, spec)
    check_tolerance(tensors, abstract, shardings, tolerance)


def replicated_over(**parameters):
    """Returns the mesh axes that are reported."""
    try:
        check(**parameters)
    except UserError as error:
        return {line.split("mesh axis ")[1].split()[0] for line in str(error).splitlines()}
    return set()


def test_a_dimension_counts_with_what_is_left_of_it_on_a_device():
    """32 in 8 parts is 4 per device, which tensor=4 divides; 16 in 8 parts is 2, which tensor=4 does not divide."""
    assert replicated_over(w=((32, 3), P("fsdp"))) == {"tensor"}
    assert replicated_over(w=((16, 3), P("fsdp"))) == set()
    assert replicated_over(w=((8, 3), P("fsdp"))) == set()
    assert replicated_over(w=((16, 4), P("fsdp"))) == {"tensor"}  # could be sharded along the other dimension


def test_an_axis_that_splits_already_does_not_count_again():
    assert replicated_over(w=((64, 64), P(("fsdp", "tensor")))) == set()
    assert replicated_over(w=((64, 64), P("tensor", "fsdp"))) == set()
    assert replicated_over(w=((64, 64), P())) == {"fsdp", "tensor"}  # not data, nor axes of size 1


def test_the_share_is_of_all_parameters():
    parameters = {"large": ((96, 64), P("fsdp", "tensor")), "small": ((32, 64), P("fsdp"))}
    with pytest.raises(UserError, match=r"mesh axis tensor leaves 25.0% .* sharding_tolerance=0.24; .*params/small"):
        check(0.24, **parameters)
    check(0.25, **parameters)
