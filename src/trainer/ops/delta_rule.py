"""The gated delta rule, which reads and corrects a memory of constant size (Yang et al. 2024, arXiv:2412.06464).

Each head starts from a given memory S [k, v]. At token t it computes

    S' = exp(decay_t) S;  S = S' + beta_t key_t (value_t - S'^T key_t)^T;  out_t = S^T query_t

A document begins with S = 0. All arrays and products are float32, on every platform. Shapes: b rows, t tokens, h heads,
k and v the widths of keys and values; n chunks of c tokens; r tokens of a row after which the memory is requested.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Chunks(NamedTuple):
    """The terms of the rule that do not depend on the memory at the start of a chunk, for all chunks.

    Attributes:
      query, key: [b, n, h, c, k].
      value: [b, n, h, c, v], the corrections that the tokens would write if the memory at the chunk's start were 0.
      read: [b, n, h, c, k]; a memory S at the chunk's start changes the corrections `value` by -read S.
      between: [b, n, h, c, c], at index (i, j), the decay from token j to token i; 0 unless j <= i and both are in the
        same document.
      since: [b, n, h, c], for each token, the decay from the chunk's start to the token; 0 if a document begins in
        between or at the token.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    read: jax.Array
    between: jax.Array
    since: jax.Array


@jax.default_matmul_precision("float32")
def gated_delta_rule(
    query_bthk: jax.Array,
    key_bthk: jax.Array,
    value_bthv: jax.Array,
    decay_bth: jax.Array,
    beta_bth: jax.Array,
    document_bt: jax.Array,
    memory_bhkv: jax.Array | None = None,
    *,
    chunk: int,
    at_br: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule chunk by chunk, with matrix products within a chunk.

    Args:
      decay_bth: at most 0. A token with decay 0 and beta 0 leaves the memory unchanged, unless it begins a document.
      document_bt: int, the index of each token's document in its row. Document 0 continues `memory_bhkv`. A token with
        a larger index than its predecessor starts with a memory of 0.
      memory_bhkv: the memory before the first token; None: 0.
      chunk: the number of tokens in a chunk.
      at_br: int, at least 0, the indices of the tokens after which the memory is returned; None: only the last token.

    Returns:
      The results, [b, t, h, v], and the memory: if `at_br` is None, after the last token, [b, h, k, v]; otherwise after
      each token in `at_br`, [b, r, h, k, v].
    """
    tokens = document_bt.shape[1]
    size = min(chunk, tokens)
    (rows, _, heads, keys), values = key_bthk.shape, value_bthv.shape[-1]
    if memory_bhkv is None:
        memory_bhkv = jnp.zeros((rows, heads, keys, values), jnp.float32)
    document_bnc = _divided(document_bt, size, mode="edge")
    given = (query_bthk, key_bthk, value_bthv, decay_bth, beta_bth)
    query, key, value, decay, beta = (jnp.moveaxis(_divided(x.astype(jnp.float32), size), 3, 2) for x in given)
    of = _chunks(query, key, value, decay, beta, document_bnc)

    def one(memory: jax.Array, of: Chunks) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        written = of.value - of.read @ memory
        scores = jnp.einsum("bhik,bhjk->bhij", of.query, of.key) * of.between
        out = of.since[..., None] * (of.query @ memory) + scores @ written
        to_end = of.key * of.between[..., -1, :, None]
        after = of.since[..., -1, None, None] * memory + jnp.einsum("bhck,bhcv->bhkv", to_end, written)
        return after, (out, *((memory, written) if at_br is not None else ()))

    last, (out, *kept) = jax.lax.scan(one, memory_bhkv, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), of))
    out_bthv = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(rows, -1, heads, values)[:, :tokens]
    return out_bthv, last if at_br is None else _memory_after(at_br, of, *(jnp.moveaxis(x, 0, 1) for x in kept))


def _divided(x_bt: jax.Array, size: int, mode: str = "constant") -> jax.Array:
    """Splits [b, t, ...] into chunks [b, n, c, ...], with padding at the end."""
    widths = [(0, 0), (0, -x_bt.shape[1] % size), *[(0, 0)] * (x_bt.ndim - 2)]
    return jnp.pad(x_bt, widths, mode=mode).reshape(len(x_bt), -1, size, *x_bt.shape[2:])


def _chunks(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, beta: jax.Array, document_bnc: jax.Array
) -> Chunks:
    """Computes `Chunks` from arrays [b, n, h, c, ...]."""
    size = decay.shape[-1]
    lower = jnp.tril(jnp.ones((size, size), bool))
    # The sums of the decays of tokens j + 1 to i. If they were computed as differences of cumulative sums, a slow decay
    # that follows a fast one would lose digits.
    after_j = jnp.where(lower & ~jnp.eye(size, dtype=bool), decay[..., None], 0)
    log = jnp.einsum("il,bnhlj->bnhij", lower.astype(jnp.float32), after_j)
    same = (document_bnc[..., :, None] == document_bnc[..., None, :]) & lower
    between = jnp.where(same[:, :, None], jnp.exp(log), 0)
    before_bn = jnp.pad(document_bnc[:, :-1, -1], ((0, 0), (1, 0)))
    carried = (document_bnc == before_bn[..., None])[:, :, None]
    since = jnp.where(carried, jnp.exp(jnp.cumsum(decay, axis=-1)), 0)
    # The correction of a token depends on the corrections of earlier tokens, so all corrections of a chunk solve a unit
    # triangular system (section 3.3 of the paper).
    system = jnp.einsum("bnhik,bnhjk->bnhij", key * beta[..., None], key) * between
    inverse = _unit_inverse(jnp.tril(system, -1)) * beta[..., None, :]
    return Chunks(query, key, inverse @ value, inverse @ (since[..., None] * key), between, since)


def _unit_inverse(strict: jax.Array) -> jax.Array:
    """Returns the inverse of I + `strict`. `strict`: [..., c, c], strictly lower triangular.

    Uses matrix products, because triangular solvers take 25 times as long on a CPU, and run row by row on a TPU.
    """
    index, identity = jnp.arange(strict.shape[-1]), jnp.eye(strict.shape[-1], dtype=strict.dtype)
    fixed, inverse, size = jax.lax.stop_gradient(strict), identity, 1
    while size < len(index):
        # Here, `inverse` contains the inverses of the diagonal blocks of `size` rows. With A' for the inverse of A, the
        # inverse of [[A, 0], [B, C]] is [[A', 0], [-C'BA', C']].
        block = index // size
        below = (block[:, None] % 2 == 1) & (block[:, None] == block + 1)
        inverse = inverse - inverse @ jnp.where(below, fixed, 0) @ inverse
        size *= 2
    # The gradient of this Newton step is that of the inverse, so the backward pass need not store the loop's steps.
    return inverse + inverse @ (identity - (identity + strict) @ inverse)


def _memory_after(at_br: jax.Array, of: Chunks, memory_bnhkv: jax.Array, written_bnhcv: jax.Array) -> jax.Array:
    """Returns the memory after each token of `at_br`. `memory_bnhkv`: the memory at the start of each chunk."""
    chunk_br, place_br = jnp.divmod(at_br, of.since.shape[-1])

    def one(chunk: jax.Array, place: jax.Array, of: Chunks, memory: jax.Array, written: jax.Array) -> jax.Array:
        key = of.key[chunk] * of.between[chunk, :, place, :, None]
        return of.since[chunk, :, place, None, None] * memory[chunk] + jnp.einsum("hck,hcv->hkv", key, written[chunk])

    each = jax.vmap(one, in_axes=(0, 0, None, None, None))
    return jax.vmap(each)(chunk_br, place_br, of, memory_bnhkv, written_bnhcv)
