"""The arguments and results of prefill and decode steps, and the insertion of prefilled sequences into slots."""

from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.inference.controls import Controls, Scores
from trainer.inference.sampling import Sampling


class Result(NamedTuple):
    """The result of a decode step, with a token for every slot; or of a prefill, with a token for every sample of every
    prompt. In a prefill, read "slots" below as the number of these samples.

    Attributes:
      tokens: int32 [slots]; the new tokens.
      valid: bool [slots]; whether the slot is in use. If not, its token has no meaning.
      lengths: int32 [slots]; the number of generated tokens, including this one.
      log_probs: float32 [slots]; the tokens' log-probabilities over the whole vocabulary, at temperature 1 or, for
        rollouts, at the temperature of rollouts. None with return_log_prob=false for an engine without
        `Served.controls`.
      scores: the tokens' scores, zeros if no sequence requests them; None for an engine without `Served.controls`.
      prompt: the scores of the argument `targets` of `Engine.prefill`; None without targets.
    """

    tokens: jax.Array
    valid: jax.Array
    lengths: jax.Array
    log_probs: jax.Array | None
    scores: Scores | None = None
    prompt: Scores | None = None


class Sequences(NamedTuple):
    """The state of generated sequences; each array is [sequences].

    Attributes:
      tokens: int32; the last token of each sequence, which is not in the cache yet.
      positions: int32; the position of that token.
      lengths: int32; how many tokens have been generated.
      used: bool; false for a slot without a sequence.
      keys: uint32 [sequences, 2]; the key of each sequence's random numbers (`sampling.sampling_key`).
      sampling: how each sequence draws its tokens.
      adapters: int32; the number of each sequence's adapter, counted from 1; 0: no adapter. None if sequences cannot
        select adapters.
      controls: the options of each sequence; None for an engine without `Served.controls`.
    """

    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array
    used: jax.Array
    keys: jax.Array
    sampling: Sampling
    adapters: jax.Array | np.ndarray | None = None
    controls: Controls | None = None


class Prefix(NamedTuple):
    """The result of a prefill: the cache of each prompt, and one or more sequences (samples) that continue the prompt.
    Samples share their prompt's cache."""

    cache: Any
    sequences: Sequences


class DecodeState(NamedTuple):
    """The input and output of a decode step: the caches and the sequences of all slots."""

    cache: Any
    sequences: Sequences


def settings(sampling: Sampling, count: int) -> Sampling:
    """Returns `sampling` as NumPy arrays with one entry for each of `count` sequences."""
    values = zip(sampling, (np.float32, np.int32, np.float32), strict=True)
    return Sampling(*(np.broadcast_to(np.asarray(value, dtype), count) for value, dtype in values))


def inserted(prefix: Prefix, state: DecodeState, slots: jax.Array) -> DecodeState:
    """Returns `state` with sequence i of `prefix` in slot `slots[i]`; `slots` is int32 [sequences]."""

    def insert(array: jax.Array, new: jax.Array) -> jax.Array:
        for i in range(slots.size):
            row = new[:, i % new.shape[1]][:, None]  # samples share their prompt's row
            array = jax.lax.dynamic_update_slice(array, row, (0, slots[i], *[0] * (array.ndim - 2)))
        return array

    sequences = jax.tree.map(lambda array, new: array.at[slots].set(new), state.sequences, prefix.sequences)
    return DecodeState(jax.tree.map(insert, state.cache, prefix.cache), sequences)


def released(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Returns `state` with `slot` free."""
    return state._replace(sequences=state.sequences._replace(used=state.sequences.used.at[slot].set(False)))
