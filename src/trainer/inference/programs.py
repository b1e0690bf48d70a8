"""The prefill and decode functions that an engine compiles."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from trainer.backends.base import tree_mode
from trainer.config.capabilities.invariant_keys import QUERIES, TILE
from trainer.config.derived import policy_temperature
from trainer.inference.controls import (
    Controls,
    Scores,
    adjusted,
    counted,
    neutral,
    said_of_targets,
    scores,
    scores_of_prompt,
)
from trainer.inference.sampling import Sampling, draw, request_keys, wrapped
from trainer.inference.served import Served, row_parts
from trainer.inference.state import DecodeState, Prefix, Result, Sequences, settings
from trainer.inference.weights import abstract_weights, canonical
from trainer.layers.cache import Cache
from trainer.models.caches import init_cache
from trainer.ops.losses import cross_entropy, tempered


class Programs:
    """The functions that an `Engine` compiles for the model of `served`. `Engine` documents their arguments.

    The attribute `abstract_weights` is a tree of ShapeDtypeStructs with shardings, which describes the argument
    `params`.
    """

    def __init__(self, served: Served):
        self.served, self.config = served, served.config
        self.abstract_weights = abstract_weights(served)
        self._parts = row_parts(served.mesh, served.rules)

    def empty(self) -> DecodeState:
        """Returns the state with no slot in use."""
        slots = self.served.slots
        zeros, sampling = jnp.zeros(slots, jnp.int32), settings(Sampling(), slots)
        adapters = None if self.served.ranks is None else zeros
        unused, keys = jnp.zeros(slots, bool), jnp.zeros((slots, 2), jnp.uint32)
        sequences = Sequences(zeros, zeros, zeros, unused, keys, sampling, adapters, self._neutral(slots))
        return DecodeState(self._no_cache(slots, self.config.max_target_length).entries, sequences)

    def prefilled(self, params, room, tokens, true_length, targets, *drawing):
        """Runs a prompt on an empty cache with `room` positions."""
        return self._run_prompt(params, self._no_cache(1, room), tokens, true_length, 0, targets, *drawing)

    def continued(self, params, entries, tokens, true_length, before, targets, *drawing):
        """Runs the next part of a prompt on the cache of the earlier parts, which contains `before` positions."""
        return self._run_prompt(params, Cache(entries, filled=True), tokens, true_length, before, targets, *drawing)

    def prefilled_packed(self, params, tokens, positions, segments, starts, lengths, requests, sampling, adapters):
        """Runs several prompts in one row."""
        params = self._canonical(params)
        ends = starts + lengths - 1
        indices = jnp.arange(tokens.size)[:, None]
        rows = ((starts <= indices) & (indices <= ends)).argmax(axis=1)[None]  # padding gets row 0, but is not written
        cache = dataclasses.replace(self._no_cache(len(requests), tokens.size), rows=rows)
        of_tokens = None if adapters is None else adapters[rows]
        hidden, entries = self._hidden(params, tokens[None], positions[None], segments[None], cache, of_tokens)
        given = requests, sampling, adapters, None
        sequences, result = self._begun(hidden[0, ends], positions[ends], *given, params)
        return Prefix(entries, sequences), result

    def generated(self, params, state):
        """Generates a token for every slot in use."""
        params = self._canonical(params)
        sequences = state.sequences
        sequences = sequences._replace(used=sequences.used & (sequences.positions < self.config.max_target_length - 1))
        count, parts = self.served.slots, self._parts
        cache = Cache(state.cache, apart=count // parts if self.config.batch_invariant else 0, filled=True)
        of_tokens = sequences.tokens, sequences.positions, sequences.used.astype(jnp.int32)
        tokens, positions, live = (self._together(of_each, parts) for of_each in of_tokens)
        of_rows = None if sequences.adapters is None else self._together(sequences.adapters, parts)
        hidden, entries = self._hidden(params, tokens, positions, live, cache, of_rows)
        sequences, result = self._result(params, self._apart(hidden, count), sequences, parts)
        return DecodeState(entries, sequences), result

    def scored(self, params, tokens, lengths, targets):
        """Returns, for each token of `targets` [b, t], its log-probability as the successor of the token at the same
        index in `tokens` [b, t], and whether it is the most likely successor."""
        params = self._canonical(params)
        index = jnp.arange(tokens.shape[1])[None]
        real = index < lengths[:, None]
        positions, rows = jnp.where(real, index, 0), jnp.arange(len(tokens))
        hidden = self.served.model.apply(*params, tokens, positions, real.astype(jnp.int32), rows)[0]
        return said_of_targets(lambda h: self._head(params, h), hidden, targets)

    def _neutral(self, count: int) -> Controls | None:
        return neutral(count, self.config.vocab_size) if self.served.controls else None

    def _no_cache(self, rows: int, length: int) -> Cache:
        with tree_mode():
            return init_cache(self.config, rows, length + -length % TILE if self.config.batch_invariant else length)

    def _hidden(
        self, params: Any, tokens: Any, positions: Any, segments: Any, cache: Cache, adapters: jax.Array | None
    ) -> tuple[Any, Any]:
        """Returns the hidden states [b, t, e] and the new entries of the cache. `adapters`: the adapter of each token,
        int32 [b, t], or of each row, int32 [b, 1]."""
        rows = jnp.arange(len(tokens))
        ranks = None if adapters is None else jnp.asarray(self.served.ranks)[adapters]
        hidden, _, cache = self.served.model.apply(*params, tokens, positions, segments, rows, cache=cache, ranks=ranks)
        return hidden, cache.entries

    def _together(self, x_b: jax.Array, parts: int = 1) -> jax.Array:
        """Returns `x_b` [b, ...] as rows of one token, [b, 1, ...].

        With `batch_invariant`, returns rows of t tokens instead, [parts, t, ...], padded so that t is a multiple of
        QUERIES. Then the bits of a token's result do not depend on t.
        """
        if not self.config.batch_invariant:
            return x_b[:, None]
        x = x_b.reshape(parts, -1, *x_b.shape[1:])
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % QUERIES), *((0, 0) for _ in x.shape[2:])))

    def _apart(self, x_bt: jax.Array, count: int) -> jax.Array:
        """Inverts `_together`: returns [count, ...]."""
        return x_bt[:, : count // len(x_bt)].reshape(count, *x_bt.shape[2:])

    def _result(self, params: Any, hidden_be: Any, sequences: Sequences, parts: int = 1) -> tuple[Sequences, Result]:
        """Draws the next token of every sequence in use from the sequence's last hidden state."""
        count = len(hidden_be)
        rows = self._together(hidden_be, parts)
        logits = self._head(params, rows)
        step, given = sequences.used.astype(jnp.int32), self._apart(logits, count)
        if sequences.controls is not None:
            given = adjusted(given, sequences.controls, sequences.used)
        drawn = draw(given, sequences.sampling, wrapped(sequences.keys), sequences.positions + 1)
        tokens = jnp.where(sequences.used, drawn, sequences.tokens)
        positions, lengths = sequences.positions + step, sequences.lengths + step
        after = sequences._replace(tokens=tokens, positions=positions, lengths=lengths)
        log_probs, found = None, None
        if sequences.controls is not None:
            after = after._replace(controls=counted(sequences.controls, drawn, sequences.used))
            found = self._scores(logits, drawn, sequences, parts)
            log_probs = found.log_probs
        elif self.config.return_log_prob:
            logits = tempered(logits, policy_temperature(self.config))
            log_probs = -self._apart(cross_entropy(logits, self._together(drawn, parts))[0], count)
        return after, Result(tokens, sequences.used, after.lengths, log_probs, found)

    def _scores(self, logits: jax.Array, drawn: jax.Array, sequences: Sequences, parts: int) -> Scores:
        """Returns the scores of the drawn tokens, or zeros if no sequence requests scores."""
        count = len(drawn)

        def found() -> Scores:
            return jax.tree.map(lambda x: self._apart(x, count), scores(logits, self._together(drawn, parts)))

        assert sequences.controls is not None
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(found))
        return jax.lax.cond((sequences.controls.scored & sequences.used).any(), found, lambda: nothing)

    def _head(self, params: Any, hidden: jax.Array) -> jax.Array:
        return self.served.model.apply(*params, hidden, method="head")[0]

    def _canonical(self, params: Any) -> Any:
        """Returns `params` as canonical variables. Raises ValueError if their structure does not fit the model."""
        layouts: list[Any] = [self.abstract_weights, self.served.abstract_variables]
        given: Any = jax.tree.structure(params)
        fits = [given == jax.tree.structure(layout) for layout in layouts]
        if not any(fits):
            raise ValueError("params are of another model: pass the result of hold or load_params")
        if not fits[0]:
            said = "params have stacked layers, which every step slices; convert them with Engine.hold for faster steps"
            warnings.warn(said, stacklevel=2)
        return canonical(params)

    def _begun(
        self, hidden_be: Any, last: Any, requests: Any, sampling: Sampling, adapters: Any, controls: Any, params: Any
    ) -> tuple[Sequences, Result]:
        """Creates a sequence for each of `requests`, and draws the sequence's first token.

        `hidden_be` and `last`: the hidden state and the position of the last token of each request's prompt, or of the
        one prompt that all requests share.
        """
        count, keys = len(requests), request_keys(requests)
        last = jnp.broadcast_to(last, count).astype(jnp.int32)
        zeros = jnp.zeros(count, jnp.int32)
        controls = self._neutral(count) if controls is None else controls
        sequences = Sequences(zeros, last, zeros, jnp.ones(count, bool), keys, sampling, adapters, controls)
        return self._result(params, jnp.broadcast_to(hidden_be, (count, hidden_be.shape[-1])), sequences)

    def _run_prompt(self, params, cache, tokens, true_length, before, targets, requests, sampling, adapters, controls):
        params = self._canonical(params)
        index = jnp.arange(tokens.size)[None]
        real = index < true_length
        positions = jnp.where(real, before + index, 0)  # 0 for padding: its index could exceed the learned positions
        of_row = None if adapters is None else adapters[:1, None]
        hidden, entries = self._hidden(params, tokens[None], positions, real.astype(jnp.int32), cache, of_row)
        last = before + true_length - 1
        given = requests, sampling, adapters, controls
        sequences, result = self._begun(hidden[:, true_length - 1], last, *given, params)
        if targets is not None:
            result = result._replace(prompt=scores_of_prompt(lambda h: self._head(params, h), hidden[0], targets))
        return Prefix(entries, sequences), result
