"""A factor on queries that grows with position, so that attention stays sharp over many keys (arXiv:2501.19399)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Temperature(NamedTuple):
    """The factor 1 + strength * log(1 + floor((position + first) / length)); `first` is 1 in Llama 4, otherwise 0."""

    strength: float
    length: int
    first: int = 0

    def factor(self, position: jax.Array) -> jax.Array:
        """Returns the factor of each position within its document, float32."""
        return 1 + self.strength * jnp.log1p(((position + self.first) // self.length).astype(jnp.float32))

    def tempered(self, query_bthd: jax.Array, position_bt: jax.Array) -> jax.Array:
        """Returns the queries times their factors, in the dtype of the queries."""
        return (query_bthd * self.factor(position_bt)[:, :, None, None]).astype(query_bthd.dtype)
