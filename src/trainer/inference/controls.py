"""Options of a request beyond `Sampling`: penalties, biases, and log-probabilities of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.errors import UserError
from trainer.ops.losses import cross_entropy

LIKELIEST = 20  # the number of most likely tokens to return with log-probabilities
_TILE = 64  # the number of tokens of a row whose logits are in memory at once


class Asked(NamedTuple):
    """The options of a request.

    Attributes:
      presence: subtracted from the logit of each token that was already generated.
      frequency: subtracted from a token's logit once for each time that the token was generated.
      repetition: divides the positive logits of prompt tokens and generated tokens, and multiplies the negative ones.
      bias: a dict from token ids to the values that are added to the tokens' logits.
      log_probs: whether events include log-probabilities, at temperature 1 and without the options above.
      prompt_log_probs: whether the first event includes the log-probabilities of the prompt. If true, no cached prefix
        is used.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = {}
    log_probs: bool = False
    prompt_log_probs: bool = False


NOTHING = Asked()


class Controls(NamedTuple):
    """The options (`Asked`) of b sequences: arrays [b], or [b, v] with a value for each token of the vocabulary.

    Attributes:
      active: bool; whether logits are changed before a token is drawn.
      scored: bool; whether log-probabilities are returned.
      prompt: bool [b, v]; which tokens are in the prompt; set only if `repetition` is not 1.
      counts: int32 [b, v]; how often each token was generated.
    """

    active: Any
    scored: Any
    presence: Any
    frequency: Any
    repetition: Any
    bias: Any
    prompt: Any
    counts: Any


class Scores(NamedTuple):
    """Log-probabilities of n tokens, at temperature 1 and over the whole vocabulary.

    Attributes:
      log_probs: float32 [n].
      tokens, top: int32 and float32 [n, LIKELIEST]; the most likely tokens and their log-probabilities, descending.
    """

    log_probs: Any
    tokens: Any
    top: Any


def check_asked(asked: Asked, vocab_size: int) -> None:
    """Raises UserError for a value that is not allowed."""
    wrong = [
        f"{name}={value}: allowed: a number" + (" above 0" if name == "repetition" else "")
        for name, value in zip(asked._fields[:3], asked[:3], strict=True)
        if not np.isfinite(value) or (name == "repetition" and value <= 0)
    ]
    wrong += [
        f"bias of token {token} is {value}: allowed: a number for each of the tokens 0 to {vocab_size - 1}"
        for token, value in asked.bias.items()
        if not (0 <= token < vocab_size and np.isfinite(value))
    ]
    if wrong:
        raise UserError("\n  ".join(["tokens cannot be drawn:", *wrong]))


def controls(asked: Asked, tokens: Sequence[int] | np.ndarray, vocab_size: int) -> Controls:
    """Returns the `Controls` of one sequence, as NumPy arrays [1] and [1, v]. `tokens`: the sequence's prompt."""
    bias, prompt = np.zeros((1, vocab_size), np.float32), np.zeros((1, vocab_size), bool)
    if asked.bias:
        bias[0, list(asked.bias)] = list(asked.bias.values())
    if asked.repetition != 1:
        prompt[0, np.asarray(tokens)] = True
    presence, frequency, repetition = (np.full(1, value, np.float32) for value in asked[:3])
    counts = np.zeros((1, vocab_size), np.int32)
    active, scored = np.full(1, bool(asked.bias) or asked[:3] != NOTHING[:3]), np.full(1, asked.log_probs)
    return Controls(active, scored, presence, frequency, repetition, bias, prompt, counts)


def neutral(count: int, vocab_size: int) -> Controls:
    """Returns the `Controls` of `count` sequences without options."""
    no, zeros = jnp.zeros(count, bool), jnp.zeros(count, jnp.float32)
    bias, prompt, counts = (jnp.zeros((count, vocab_size), dtype) for dtype in (jnp.float32, bool, jnp.int32))
    return Controls(no, no, zeros, zeros, jnp.ones(count, jnp.float32), bias, prompt, counts)


def adjusted(logits_bv: jax.Array, it: Controls, used_b: jax.Array) -> jax.Array:
    """Returns the logits from which tokens are drawn, float32 [b, v]. Rows without options are unchanged."""

    def changed() -> jax.Array:
        logits, drawn = logits_bv.astype(jnp.float32), it.counts > 0
        factor = jnp.where(drawn | it.prompt, it.repetition[:, None], 1)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        return logits - it.frequency[:, None] * it.counts - it.presence[:, None] * drawn + it.bias

    return jax.lax.cond((it.active & used_b).any(), changed, lambda: logits_bv.astype(jnp.float32))


def counted(it: Controls, drawn_b: jax.Array, used_b: jax.Array) -> Controls:
    """Returns the controls `it` with the drawn tokens `drawn_b` added to `counts`, except for sequences that are not in
    use (`used_b`)."""
    rows = jnp.arange(len(drawn_b))
    return it._replace(counts=it.counts.at[rows, drawn_b].add(used_b.astype(jnp.int32)))


def scores(logits_ntv: jax.Array, targets_nt: jax.Array) -> Scores:
    """Returns the `Scores` of n rows of t targets: its arrays begin with the axes [n, t] instead of [n]."""
    nll, log_z = cross_entropy(logits_ntv, targets_nt)
    top, tokens = jax.lax.top_k(logits_ntv.astype(jnp.float32), min(LIKELIEST, logits_ntv.shape[-1]))
    return Scores(-nll, tokens, top - log_z[..., None])


def scores_of_prompt(head: Any, hidden_te: jax.Array, targets_t: jax.Array) -> Scores:
    """Returns the scores of the targets. `head` is a function: hidden states [1, n, e] -> logits [1, n, v]."""
    found = _tiled(lambda h, t: scores(head(h), t), hidden_te[None], targets_t[None])
    return jax.tree.map(lambda x: x[0], found)


def said_of_targets(head: Any, hidden_bte: jax.Array, targets_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the log-probability of each target, float32 [b, t], and whether it is the most likely token, bool.
    `head` is a function: hidden states [b, n, e] -> logits [b, n, v]."""

    def said(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = head(hidden)
        return -cross_entropy(logits, targets)[0], jnp.argmax(logits, axis=-1) == targets

    return _tiled(said, hidden_bte, targets_bt)


def _tiled(fn: Any, hidden_bte: jax.Array, targets_bt: jax.Array) -> Any:
    """Applies `fn` to tiles of n tokens, so that the logits of all t tokens never exist at once. Returns the
    concatenated results, [b, t, ...]. `fn` is a function: hidden states [b, n, e], targets [b, n] -> arrays
    [b, n, ...]."""
    rows, count = targets_bt.shape
    tiles = -(-count // _TILE)

    def cut(x: jax.Array) -> jax.Array:
        rest = x.shape[2:]
        padded = jnp.pad(x, ((0, 0), (0, tiles * _TILE - count), *((0, 0) for _ in rest)))
        return jnp.moveaxis(padded.reshape(rows, tiles, _TILE, *rest), 1, 0)

    found = jax.lax.map(lambda tile: fn(*tile), (cut(hidden_bte), cut(targets_bt)))

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(rows, tiles * _TILE, *x.shape[3:])[:, :count]

    return jax.tree.map(joined, found)
