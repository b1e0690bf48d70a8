"""Classifies a parameter by its logical axes: a matrix with inputs and outputs, a norm's scale, or a bias.

A side of a parameter is a group of axes that together form inputs or outputs: the axes of the heads, or any other axis
by itself. Axes that stack independent parameters belong to no side. A norm or a bias has at most one side. A matrix has
two sides, with its inputs first.
"""

from collections.abc import Sequence

from trainer.sharding import STACKED as OF_STACKS

# Axes that stack independent matrices: layers, and projections fused into one array.
STACKED = frozenset((*OF_STACKS, "qkv", "num_activations"))
# The axis of experts. If it is the first axis outside of STACKED, it stacks independent matrices, too; otherwise, it is
# a router's output axis.
EXPERTS = "exp"
# Adjacent axes of this set form one side: [heads, head_dim] is the flattened output of a projection.
HEADS = frozenset(("heads", "q_heads", "kv_heads", "kv", "kv_head_dim", "head_dim"))
# The axis of tokens in embedding tables and output heads. A custom embedding table is recognized only by this name.
VOCAB = "vocab"
# The axis of the residual stream.
WIDTH = "embed"

Side = tuple[int, ...]  # the indices of the side's axes


def sides(names: Sequence[str | None]) -> list[Side]:
    """Returns the sides of a parameter with the logical axes `names`, in the order of the axes."""
    groups: list[Side] = []
    for i, name in enumerate(names):
        if name in STACKED or (name == EXPERTS and not groups):
            continue
        if groups and name in HEADS and names[i - 1] in HEADS:
            groups[-1] += (i,)
        else:
            groups.append((i,))
    return groups


def is_matrix(names: Sequence[str | None]) -> bool:
    """Returns True for matrices, False for norms, biases and scalars."""
    return len(sides(names)) > 1


def matrix_axes(names: Sequence[str | None]) -> tuple[Side, Side] | None:
    """Returns the axes of the inputs and of the outputs of a matrix inside the model.

    Returns None for embeddings, output heads and routers, and for parameters that are not matrices. Also returns None
    if the names do not distinguish inputs from outputs, that is, if there are more than two sides and the residual
    stream is neither the first nor the last side.
    """
    parts = sides(names)
    flat = [names[i] for side in parts for i in side]
    if len(parts) < 2 or VOCAB in flat or EXPERTS in flat:
        return None
    if len(parts) == 2:
        return parts[0], parts[1]
    if flat[0] == WIDTH:
        return parts[0], sum(parts[1:], ())
    return (sum(parts[:-1], ()), parts[-1]) if flat[-1] == WIDTH else None
