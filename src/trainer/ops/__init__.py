"""Pure functions on arrays, which use neither Flax nor a mesh object.

The letters in shapes, unless a module defines them otherwise: b rows of the batch, t query positions, s key positions,
h query heads, k key and value heads, g = h / k, d width of a head, e width of the residual stream, f hidden width of
the MLP, v vocabulary.
"""
