"""What a parameter is, read from its logical axes: a matrix with inputs and outputs, or a norm's scale or a bias.

A side of a parameter is a group of axes that are inputs, or outputs, together: those of the heads, or any other axis by
itself. Axes along which independent parameters are stacked belong to no side. A norm and a bias have one side at most;
a matrix has two, its inputs first.
"""

from collections.abc import Sequence

from trainer.layers.param import LAYERS

# Independent matrices along any axis: layers, and projections that are fused into one array.
STACKED = frozenset((LAYERS, "qkv", "num_activations"))
# Independent matrices along a leading axis; behind another axis it counts the outputs of a router.
EXPERTS = "exp"
# Adjacent ones are one side: [heads, head_dim] is the flattened output of a projection.
HEADS = frozenset(("heads", "q_heads", "kv_heads", "kv", "kv_head_dim", "head_dim"))
# Tables that are indexed, and output heads: their rows are tokens. A user's own table has no other sign.
VOCAB = "vocab"
# The axis of the residual stream.
WIDTH = "embed"

Side = tuple[int, ...]  # the positions of its axes


def sides(names: Sequence[str | None]) -> list[Side]:
    """The sides of a parameter with the logical axes `names`, in their order."""
    found: list[Side] = []
    for i, name in enumerate(names):
        if name in STACKED or (name == EXPERTS and not found):
            continue
        if found and name in HEADS and names[i - 1] in HEADS:
            found[-1] += (i,)
        else:
            found.append((i,))
    return found


def is_matrix(names: Sequence[str | None]) -> bool:
    """False for norms, biases and scalars."""
    return len(sides(names)) > 1


def matrix_axes(names: Sequence[str | None]) -> tuple[Side, Side] | None:
    """The axes of the inputs and of the outputs of a matrix inside the model.

    None for embeddings, output heads and routers, for what is no matrix, and where the names do not tell inputs from
    outputs: with more than two sides, unless the residual stream is the first or the last.
    """
    found = sides(names)
    flat = [names[i] for side in found for i in side]
    if len(found) < 2 or VOCAB in flat or EXPERTS in flat:
        return None
    if len(found) == 2:
        return found[0], found[1]
    if flat[0] == WIDTH:
        return found[0], sum(found[1:], ())
    return (sum(found[:-1], ()), found[-1]) if flat[-1] == WIDTH else None
