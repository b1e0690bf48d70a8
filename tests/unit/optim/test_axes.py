"""What a parameter is, by its logical axes."""

import pytest

from trainer.optim.axes import is_matrix, sides


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("norm", [(0,)]),
        ("layers norm", [(1,)]),
        ("layers mlp", [(1,)]),  # a bias
        ("layers q_heads kv", [(1, 2)]),  # a bias of queries
        ("layers exp", []),  # a bias of a router
        ("exp layers mlp", [(2,)]),  # a bias of experts
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
