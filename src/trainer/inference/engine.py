"""The engine that generates text: prefill of prompts, insertion into slots, and decode steps over all slots.

A prompt is padded to one of a few lengths, prefilled, and then inserted into a slot. A decode step adds one token to
every slot in use. Prefill is compiled once for each padded length, and decoding once for all sequence lengths. The
engine has compiled functions but no state: caches are arguments and results.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainer.aot.compilation import compile_step
from trainer.aot.report import Report
from trainer.config.capabilities.invariant_keys import QUERIES, TILE, compiler_options
from trainer.config.capabilities.quantization_keys import options_for_stored
from trainer.inference.controls import NOTHING, Asked, Controls, controls, neutral
from trainer.inference.programs import Programs
from trainer.inference.prompts import Packed, Rows
from trainer.inference.sampling import Sampling, check_drawing, sampling_of
from trainer.inference.served import Served, longest_prompt
from trainer.inference.state import DecodeState, Prefix, Result, inserted, released, settings
from trainer.inference.weights import to_weights
from trainer.models.caches import PLACES, cache_axes, packs_rows
from trainer.sharding import Axes


class Engine:
    """Prefills prompts, inserts them into slots and generates, with the model of `served`.

    Except in `hold`, the argument `params` is always a result of `hold`: the canonical variables (params, rest) in the
    layout of the compiled functions.
    """

    def __init__(self, served: Served):
        self.served, self.config = served, served.config
        self._programs = programs = Programs(served)
        abstract = jax.eval_shape(programs.empty)
        self._cache_axes = jax.tree.leaves(cache_axes(self.config), is_leaf=lambda leaf: isinstance(leaf, Axes))
        self._cache_length = max(self.places(abstract.cache))
        self._packs_rows = packs_rows(self.config)
        replicated = jax.tree.map(lambda _: served.replicated, abstract)
        self.state_shardings = replicated._replace(cache=self._shardings_of(abstract.cache))
        options = compiler_options(self.config, served.platform) | options_for_stored(self.config, served.platform)
        compiled = functools.partial(jax.jit, compiler_options=options)
        self._start = jax.jit(programs.empty, out_shardings=self.state_shardings)
        self._prefill = compiled(served.on_mesh(programs.prefilled, one_row=True), static_argnums=1)
        self._continue = compiled(served.on_mesh(programs.continued, one_row=True), donate_argnums=1)
        self._pack = compiled(served.on_mesh(programs.prefilled_packed, one_row=True))
        self._insert = jax.jit(inserted, donate_argnums=1, out_shardings=self.state_shardings)
        self._release = jax.jit(released, donate_argnums=0, out_shardings=self.state_shardings)
        outputs = (self.state_shardings, served.replicated)
        self._score = compiled(served.on_mesh(programs.scored), out_shardings=served.replicated)
        self._generate = compiled(served.on_mesh(programs.generated), donate_argnums=1, out_shardings=outputs)

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self.served.slots

    @property
    def max_prefill_length(self) -> int:
        """The maximum number of tokens of a prompt, which leaves room for one generated token."""
        return longest_prompt(self.config)

    @property
    def use_chunked_prefill(self) -> bool:
        """Whether long prompts are prefilled in chunks."""
        return self.config.use_chunked_prefill

    @property
    def prefill_chunk_size(self) -> int:
        """The number of tokens of a chunk."""
        return self.config.prefill_chunk_size

    def part(self, tokens: np.ndarray, whole: bool = False) -> np.ndarray:
        """Returns `tokens`, a chunk of a prompt, padded to the next bucket: int32 [bucket]. Pads to prefill_chunk_size
        if `whole` is true or no smaller bucket is long enough."""
        sizes = [size for size in self.rows.buckets if size < self.prefill_chunk_size and not whole]
        size = next((size for size in sizes if size >= tokens.size), self.prefill_chunk_size)
        return np.pad(tokens, (0, size - tokens.size))

    def controls(self, asked: Asked, tokens: np.ndarray) -> Controls | None:
        """Converts a request's options `asked` to the argument `controls` of `prefill`. Returns None if
        `Served.controls` is false. `tokens`: the request's prompt."""
        if not self.served.controls:
            return None
        made = controls(asked, tokens, self.config.vocab_size) if asked != NOTHING else None
        return self._nothing if made is None else jax.device_put(made, self.served.replicated)

    @functools.cached_property
    def _nothing(self) -> Controls:
        return jax.device_put(neutral(1, self.config.vocab_size), self.served.replicated)

    @property
    def _in_parts(self) -> bool:
        """Whether a prefill may process only a part of a prompt, with further parts to follow."""
        return self.use_chunked_prefill or self.config.enable_prefix_caching

    @functools.cached_property
    def rows(self) -> Rows:
        """Converts prompts to rows for `prefill` and `prefill_concat`."""
        multiples = (QUERIES, TILE) if self.config.batch_invariant else (1, 1)
        return Rows(self.max_prefill_length, self.config.vocab_size, *multiples)

    def padded(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns `tokens`, padded to the next bucket: int32 [bucket]. See `Rows.padded`."""
        return self.rows.padded(tokens)

    def packed(self, prompts: Sequence[Sequence[int]]) -> Packed:
        """Returns several prompts as one row, padded to the next bucket. See `Rows.packed`."""
        return self.rows.packed(prompts)

    def hold(self, params: Any, rest: Any, *, donate: bool = False) -> Any:
        """Converts canonical variables to the argument `params` of the other methods; see `to_weights`."""
        return to_weights((params, rest), self.served, donate)

    def init_decode_state(self) -> DecodeState:
        """Returns the state with no slot in use."""
        return self._start()

    def prefill(
        self,
        params: Any,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        *,
        existing_prefix: Prefix | None = None,
        num_samples: int = 1,
        sampling: Sampling | None = None,
        seed: int | None = None,
        room: int | None = None,
        adapter: int = 0,
        sample: int = 0,
        controls: Controls | None = None,
        targets: np.ndarray | None = None,
    ) -> tuple[Prefix, Result]:
        """Runs a prompt through the model and draws the next token.

        Args:
          padded_tokens: int32 [t], the prompt; with `existing_prefix`, the prompt's next part.
          true_length: the number of tokens before the padding.
          existing_prefix: the `Prefix` of the call, with `room`, for the preceding part of the prompt; its cache is
            donated.
          num_samples: the number of sequences that continue the prompt, each with different random numbers.
          sampling, seed: see `Sampling` and `sampling_key` in `trainer.inference.sampling`; default: the keys
            decode_sampling_*.
          room: the number of positions in the cache, including positions for further parts of the prompt; default:
            max_prefill_length with use_chunked_prefill or enable_prefix_caching, otherwise t.
          adapter: the adapter of the sequences, counted from 1; 0: none. Requires an engine with `Served.ranks`.
          sample: the number of the first sequence; sequences with equal seeds and different numbers draw different
            tokens.
          controls: the sequences' options; default: none. Requires an engine with `Served.controls`.
          targets: int32 [t]; if given, `Result.prompt` contains the score of each target as the successor of the prompt
            token at the same index.

        Raises:
          ValueError: the prompt is empty or does not fit into its cache, or `adapter` does not exist.
        """
        adapters = self.numbered([adapter] * num_samples)
        seeds = None if seed is None else [seed] * num_samples
        requests, sampling = self._drawing(num_samples, sampling, seeds, sample)
        drawing = targets, requests, sampling, adapters, controls
        if not 1 <= true_length <= padded_tokens.size:
            raise ValueError(f"true_length={true_length}: allowed: 1 to {padded_tokens.size}")
        if existing_prefix is None:
            room = room or (self.max_prefill_length if self._in_parts else padded_tokens.size)
            if not true_length <= room <= self.config.max_target_length:
                raise ValueError(f"room={room}: allowed: {true_length} to {self.config.max_target_length}")
            return self._prefill(params, room, padded_tokens, true_length, *drawing)
        cache, before = existing_prefix.cache, int(np.asarray(existing_prefix.sequences.positions)[0])
        length, needed = max(self.places(cache)), before + true_length
        if length < min(needed, self._cache_length):  # a ring cache has room for any sequence
            raise ValueError(
                f"the cache has room for {length} tokens, but needs {needed}; give room= with the first part"
            )
        return self._continue(params, cache, padded_tokens, true_length, before, *drawing)

    def places(self, cache: Any) -> list[int]:
        """Returns the number of positions in each array of `cache`; 0 for state without a position axis."""
        pairs = zip(self._cache_axes, jax.tree.leaves(cache), strict=True)
        return [leaf.shape[names.index(PLACES)] if PLACES in names else 0 for names, leaf in pairs]

    def prefill_multisampling(
        self, params: Any, padded_tokens: jax.Array | np.ndarray, true_length: int, num_samples: int, **how: Any
    ) -> tuple[Prefix, Result]:
        """Runs `prefill` for `num_samples` sequences. Each sequence gets the tokens that a separate request with the
        same random key would get."""
        return self.prefill(params, padded_tokens, true_length, num_samples=num_samples, **how)

    def prefill_concat(
        self,
        params: Any,
        padded_tokens: jax.Array | np.ndarray,
        decoder_positions: jax.Array | np.ndarray,
        decoder_segment_ids: jax.Array | np.ndarray,
        start_pos: jax.Array | np.ndarray,
        true_lengths: jax.Array | np.ndarray,
        num_prompts: int,
        *,
        sampling: Sampling | None = None,
        seeds: Sequence[int] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> tuple[Prefix, Result]:
        """Prefills several prompts in one pass: prompt i is sequence i of the results. `bulk_insert` inserts them.

        Args:
          padded_tokens, decoder_positions, decoder_segment_ids, start_pos, true_lengths, num_prompts: the fields of
            `Packed`, passed as `*packed(prompts)`.
          sampling: the settings for all prompts; its fields may be arrays with an entry for each prompt.
          seeds: the seed of each prompt, as in `prefill`; default: decode_sampling_seed for all prompts.
          adapters: the adapter of each prompt, as in `prefill`; default: no adapter.

        Raises:
          ValueError: a block does not keep separate states for the prompts of a row; or batch_invariant is true, and a
            prompt does not begin at a multiple of TILE.
        """
        if not self._packs_rows:
            raise ValueError("a block does not keep separate states for the prompts of a row; prefill each prompt")
        if self.config.batch_invariant and np.any(np.asarray(start_pos) % TILE):
            raise ValueError(
                f"start_pos={list(map(int, start_pos))}: with batch_invariant, prompts begin at multiples of {TILE}"
            )
        requests, sampling = self._drawing(num_prompts, sampling, seeds)
        starts, lengths = start_pos[:num_prompts], true_lengths[:num_prompts]
        drawing = requests, sampling, self.numbered(adapters or [0] * num_prompts)
        return self._pack(params, padded_tokens, decoder_positions, decoder_segment_ids, starts, lengths, *drawing)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Returns `decode_state`, which is donated, with the sequence of `prefix` in `slot`."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: Prefix, decode_state: DecodeState, slots: Sequence[int]) -> DecodeState:
        """Returns `decode_state`, which is donated, with sequence i of `prefix` in slot `slots[i]`.

        Raises:
          ValueError: `slots` does not contain a different, existing slot for each sequence.
        """
        count = prefix.sequences.tokens.size
        valid = all(0 <= slot < self.max_concurrent_decodes for slot in slots)
        if len(slots) != count or len(set(slots)) < count or not valid:
            raise ValueError(
                f"{count} sequences need as many different slots below {self.max_concurrent_decodes}; given: {slots}"
            )
        return self._insert(prefix, decode_state, np.asarray(slots, np.int32))

    def release(self, decode_state: DecodeState, slot: int) -> DecodeState:
        """Frees `slot`: returns `decode_state`, which is donated, without the sequence in it."""
        return self._release(decode_state, slot)

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, Result]:
        """Adds a token to every sequence in use that is shorter than max_target_length. `decode_state` is donated."""
        return self._generate(params, decode_state)

    @functools.cached_property
    def _scored_rows(self) -> Rows:
        return Rows(
            self.config.max_target_length, self.config.vocab_size, QUERIES if self.config.batch_invariant else 1
        )

    def score(self, params: Any, rows: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Scores the tokens of each row, in one pass without a cache.

        All rows are padded to the longest row's bucket, and the number of rows is padded to the number of slots.

        Returns:
          For each row of n tokens, two arrays [n - 1] for all tokens but the first: the token's log-probability given
          the tokens before it, float32, and whether it is the most likely token, bool.

        Raises:
          ValueError: there are more rows than slots, or a row does not have 2 to max_target_length + 1 tokens.
          UserError: a token is not an id of the vocabulary.
        """
        lengths, slots = [len(row) - 1 for row in rows], self.max_concurrent_decodes
        if not 1 <= len(rows) <= slots or not 1 <= min(lengths) <= max(lengths) <= self.config.max_target_length:
            raise ValueError(
                f"{len(rows)} rows of {sorted({length + 1 for length in lengths})} tokens: allowed: 1 to {slots} rows "
                f"of 2 to {self.config.max_target_length + 1}"
            )
        size = next(size for size in self._scored_rows.buckets if size >= max(lengths))
        tokens, targets = np.zeros((2, slots, size), np.int32)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids = self._scored_rows.checked(row)
            tokens[i, :length], targets[i, :length] = ids[:-1], ids[1:]
        counts = np.array([*lengths, *[0] * (slots - len(rows))], np.int32)
        log_probs, likeliest = jax.device_get(self._score(params, tokens, counts, targets))
        return [(log_probs[i, :length], likeliest[i, :length]) for i, length in enumerate(lengths)]

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.served.mesh

    def parts(self) -> dict[str, Any]:
        """Returns a dict from the names of the arguments of `generate` to ShapeDtypeStructs with shardings, for
        `aot.report`."""
        shapes = jax.eval_shape(self._programs.empty)
        state = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, self.state_shardings
        )
        return {"parameters": self._programs.abstract_weights, "cache": state.cache, "sequences": state.sequences}

    def aot_compile(self, options: Mapping[str, Any] | None = None) -> tuple[Any | None, Report]:
        """Compiles `generate` without parameters and without a cache, also for devices that this machine does not have.

        Args:
          options: additional XLA options.

        Returns:
          The executable, called as `executable(params, decode_state)`, or None if it does not fit in the devices'
          memory; and a report in the form of `trainer.train_compile`.
        """
        parts = self.parts()
        state = DecodeState(parts["cache"], parts["sequences"])
        slices = self.config.compile_topology_num_slices
        return compile_step(self, lambda: self._generate.lower(parts["parameters"], state), slices, options)

    def _drawing(
        self, count: int, sampling: Sampling | None, seeds: Sequence[int] | None, first: int = 0
    ) -> tuple[np.ndarray, Sampling]:
        """Returns the seed and sample number of each of `count` sequences, [count, 2], and the sampling settings. Uses
        NumPy, because JAX would compile each operation separately. Raises UserError for values that are not allowed."""
        seeds = [self.config.decode_sampling_seed] * count if seeds is None else seeds
        given = sampling_of(self.config) if sampling is None else sampling
        check_drawing(given, seeds)
        repeated = [first + list(seeds[:i]).count(seed) for i, seed in enumerate(seeds)]  # sample numbers
        return np.stack([seeds, repeated], axis=1).astype(np.uint32), settings(given, count)

    def numbered(self, numbers: Sequence[int]) -> np.ndarray | None:
        """Returns the adapter numbers of sequences as an array; None if sequences cannot select adapters. Raises
        ValueError for an adapter that does not exist."""
        last = 0 if self.served.ranks is None else len(self.served.ranks) - 1
        if wrong := [number for number in numbers if not 0 <= number <= last]:
            raise ValueError(f"adapter={wrong[0]}: the engine has {last} adapters to choose from")
        return None if self.served.ranks is None else np.asarray(numbers, np.int32)

    def _shardings_of(self, cache: Any) -> Any:
        leaves, structure = jax.tree.flatten(cache)
        pairs = zip(self._cache_axes, leaves, strict=True)
        return jax.tree.unflatten(structure, [self.served.sharding(names, leaf.shape) for names, leaf in pairs])
