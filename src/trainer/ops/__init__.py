"""Pure functions on arrays, without Flax or a mesh.

The letters in shapes: b rows of the batch, t query positions, s key positions, h query heads, k key and value heads,
g = h / k, d width of a head, e width of the residual stream, f hidden width of the MLP, v vocabulary.
"""
