"""Classification of parameters by their logical axes."""

import pytest

from trainer.optim.axes import is_matrix, matrix_axes, sides


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("norm", [(0,)]),
        ("layers norm", [(1,)]),
        ("layers mlp", [(1,)]),  # bias
        ("layers q_heads kv", [(1, 2)]),  # bias of queries
        ("layers exp", []),  # bias of a router
        ("exp layers mlp", [(2,)]),  # bias of experts
        ("layers embed mlp", [(1,), (2,)]),
        ("embed layers q_heads kv", [(0,), (2, 3)]),  # layers may be on any axis
        ("layers embed kv_heads kv_head_dim", [(1,), (2, 3)]),
        ("layers heads kv embed", [(1, 2), (3,)]),
        ("layers exp embed mlp", [(2,), (3,)]),
        ("layers embed exp", [(1,), (2,)]),  # a router
        ("layers embed qkv heads kv", [(1,), (3, 4)]),  # three fused matrices
        ("layers embed num_activations mlp", [(1,), (3,)]),
        ("vocab embed", [(0,), (1,)]),
        ("layers own_inputs own_outputs", [(1,), (2,)]),
        ("layers - -", [(1,), (2,)]),  # a user's block without names
        ("layers -", [(1,)]),
        ("", []),
    ],
)
def test_the_sides_of_a_parameter(names, expected):
    found = [None if name == "-" else name for name in names.split()]
    assert sides(found) == expected
    assert is_matrix(found) == (len(expected) == 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("layers embed mlp", ((1,), (2,))),
        ("layers mlp embed", ((1,), (2,))),
        ("layers embed q_heads kv", ((1,), (2, 3))),
        ("layers embed kv_heads kv_head_dim", ((1,), (2, 3))),
        ("layers heads kv embed", ((1, 2), (3,))),
        ("embed layers heads kv", ((0,), (2, 3))),
        ("layers exp embed mlp", ((2,), (3,))),
        ("exp layers mlp embed", ((2,), (3,))),
        ("layers embed qkv heads kv", ((1,), (3, 4))),
        ("layers embed num_activations mlp", ((1,), (3,))),
        ("layers q_lora q_heads kv", ((1,), (2, 3))),
        ("layers - -", ((1,), (2,))),
        ("embed own own_too", ((0,), (1, 2))),  # names of a user's block, next to the residual stream's axis
        ("own own_too embed", ((0, 1), (2,))),
        ("own own_too own_three", None),  # it is unknown which axes are inputs
        ("vocab embed", None),
        ("embed vocab", None),
        ("layers embed exp", None),
        ("layers norm", None),
        ("layers exp mlp", None),
        ("layers q_heads kv", None),
        ("", None),
    ],
)
def test_the_matrix_that_muon_orthogonalizes(names, expected):
    assert matrix_axes([None if name == "-" else name for name in names.split()]) == expected
