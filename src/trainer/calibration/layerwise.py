"""Quantizes a model layer by layer, calibrated with statistics of each kernel's inputs.

The layers of the stacks run one after another over all batches of text. Each layer runs twice: first to record the
inputs of its kernels, then with its quantized kernels, so that the next layer is calibrated with the inputs that it
will have in the quantized model. All kernels of a layer are calibrated from one recording pass, so a kernel does not
compensate for the quantization errors of the layer's other kernels.

At any time, memory contains the parameters and statistics of one layer, and the layer's inputs and outputs for all
batches. AWQ needs temporaries of 41 times the size of a kernel. GPTQ's Hessians, float32 [in, in] per kernel and
expert, may be larger than the layer: for the output projections of 8 experts with 14,336 hidden units they take 6.6 GB.
"""

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.backends.base import tree_mode
from trainer.calibration.recording import Recorder, Statistics, empty, of_rows
from trainer.config.capabilities.sparsity_keys import is_sparse
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.matrices import choose_products, matrices
from trainer.models.families import family, stacks
from trainer.models.matrices import matrix_names
from trainer.models.norms import make_norm
from trainer.models.transformer import (
    first_input,
    head_matrix,
    make_embedder,
    make_logits_dense,
    make_position_embedder,
)
from trainer.observe.text import clock
from trainer.products.context import Context
from trainer.products.plain import GroupedProduct, Kernel, Product, Rules, make_plain, maker

# Returns parameters as a nested dict, given a canonical path and a number. The number selects a layer of the stack at
# this path; examples are ("decoder/layers", 3) and ("decoder/layers/layers_1", 0). If the number is None, the path is
# that of a part outside of the stacks; examples are ("token_embedder", None) and ("decoder/decoder_norm", None).
Read = Callable[[str, int | None], Mapping[str, Any]]
# Quantizes a kernel: (canonical name, kernel [*groups, in, out], statistics) -> (the stored form of the kernel, the
# dequantized kernel that the layer uses from now on).
Quantize = Callable[[str, jax.Array, Statistics], tuple[Any, jax.Array]]


class Layer(NamedTuple):
    """The result of quantizing one layer or the output head.

    Attributes:
      path, number: the arguments of `Read` for the layer; ("decoder/logits_dense", None) for the output head.
      stored: the stored forms that `quantize` returned, by canonical name.
      hidden: the hidden states [b, t, e] of each batch after this layer, which are the inputs of the next layer.
    """

    path: str
    number: int | None
    stored: dict[str, Any]
    hidden: list[jax.Array]


def calibrate(
    config: Config,
    batches: Iterable[Mapping[str, Any]],
    read: Read,
    rest: Mapping[str, Any],
    quantize: Quantize,
    chosen: Callable[[str], bool],
    *,
    hessian: bool,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Layer]:
    """Quantizes the kernels for whose canonical name `chosen` returns True. Yields the result for one layer after
    another.

    `quantize` is never called for the embedding table (tied to the head or not) or for modules of multi-token
    prediction, even if `chosen` selects them. The caller may keep these parameters in floating point or round them
    without calibration. The configuration's dropout, token dropping and `quantization` have no effect. This runs on one
    device, so no mesh may be active.

    Args:
      config: the resolved configuration.
      batches: dicts with the fields inputs, inputs_position and inputs_segmentation, int [b, t].
      read: returns parameters. It is called once for each layer, in the order of the forward pass, and for each part
        outside of the stacks.
      rest: the canonical buffers of the whole model, such as biases of routers.
      hessian: whether the statistics include the Hessians that GPTQ needs.
      say: called with a progress message for each layer, and with a note if experts received no tokens.

    Raises:
      UserError: the model family has its own product for a chosen kernel, no kernel is chosen, the model uses weight
        sparsity or a custom Linen block, every token is padding, or the hidden states need more than half of the
        host's memory.
    """
    _check(config, chosen)
    contexts, hidden = texts = _embedded(config, batches, read)
    recorder, total, done, start = Recorder(hessian), sum(it.layers for it in stacks(config)), 0, time.monotonic()
    for stack in stacks(config):
        blocks = [
            _Block(config, make, path, chosen, recorder) for make, path in zip(stack.blocks, stack.paths, strict=True)
        ]
        for number, block in itertools.product(range(stack.count), blocks):
            held = block.variables(read(block.path, number), rest, number)
            found = block.record(held, hidden, contexts)
            done += 1
            if note := _without_tokens(found):
                say(f"layer {done}: {note}")
            stored = block.quantize(held, found, quantize)
            for i, context in enumerate(contexts):
                hidden[i] = block.run(held, hidden[i], context)
            jax.block_until_ready(hidden)
            left = (time.monotonic() - start) / done * (total - done)
            say(f"layer {done} of {total}, {clock(left)} left")
            yield Layer(block.path, number, stored, list(hidden))
            del held, found, stored  # frees memory before the next layer is read
    if not config.logits_via_embedding and chosen("/".join(head_matrix(config))):
        yield _head(config, texts, read, quantize, hessian)


def _check(config: Config, chosen: Callable[[str], bool]) -> None:
    names = [name for name in matrix_names(config) if chosen(name)]
    rules = family(config.decoder_block).products(config)
    if own := [name for name in names if maker(rules, name)]:
        raise UserError(
            f"decoder_block={config.decoder_block}: {', '.join(own)} cannot be calibrated, because the family defines "
            "the product"
        )
    if is_sparse(config):
        raise UserError(
            f"weight_sparsity_m={config.weight_sparsity_m}: a model with masked weights cannot be calibrated"
        )
    if not names:
        raise UserError(
            f"no matrix is chosen to be quantized; the model's matrices are: {', '.join(matrix_names(config))}"
        )


class _Texts(NamedTuple):
    """The context and the current hidden states of each batch."""

    contexts: list[Context]
    hidden: list[jax.Array]


def _embedded(config: Config, batches: Iterable[Mapping[str, Any]], read: Read) -> _Texts:
    """Returns the context of each batch, and its hidden states before the first layer.

    Raises:
      UserError: every token is padding, or the hidden states before and after a layer need more than half of the
        host's memory.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    embed = _module(lambda rngs: make_embedder(config, rngs), read("token_embedder", None))
    table = functools.cache(
        lambda: _module(lambda rngs: make_position_embedder(config, rngs), read("decoder/position_embedder", None))
    )
    texts = _Texts([], [])
    for batch in batches:
        positions, segments = (jnp.asarray(batch[f"inputs_{name}"]) for name in ("position", "segmentation"))
        context = Context(positions, segments, jnp.arange(len(segments)), None)
        texts.contexts.append(context)
        texts.hidden.append(first_input(config, embed(jnp.asarray(batch["inputs"])), table, context))
        if 2 * sum(x.nbytes for x in texts.hidden) > limit:
            raise UserError(
                f"the hidden states of {sum(x.shape[0] for x in texts.hidden):,} rows of text take half of this "
                "machine's memory; give fewer calibration_rows, or a smaller max_target_length"
            )
    if not any((context.segments != 0).any() for context in texts.contexts):
        raise UserError("there is no text to calibrate with: there are no tokens other than padding")
    return texts


class _Block:
    """A block that records statistics of the inputs of its chosen kernels.

    Kernels have names relative to the block, so that identical blocks share compiled programs.
    """

    def __init__(self, config: Config, make: Any, path: str, chosen: Callable[[str], bool], recorder: Recorder):
        self.path, self.recorder = f"decoder/{path}", recorder
        rules: Rules = [*family(config.decoder_block).products(config), ("", self._product)]

        def made() -> Any:
            block = make(config, nnx.Rngs(0))
            found = [kernel for *_, kernel in matrices(block, self.path) if chosen(kernel.name)]
            self.kernels = {self._within(kernel): kernel for kernel in found}
            recorder.use_in(block)
            return choose_products(block, self.path, rules, nnx.Rngs(0))

        with tree_mode():
            split: Any = nnx.split(nnx.eval_shape(made), nnx.Param, ...)
        self.graphdef, self.params, self.rest = split

    def _within(self, kernel: Kernel) -> str:
        return kernel.name.removeprefix(f"{self.path}/")

    def _product(self, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
        name = self._within(kernel)
        return self.recorder.product(kernel, name) if name in self.kernels else make_plain(kernel, rngs=rngs)

    def variables(self, params: Mapping[str, Any], rest: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Returns a dict from names to the variables of layer `number`. `params`: the layer's parameters; `rest`: all
        buffers of the model."""
        buffers: Any = rest
        for name in self.path.split("/"):
            buffers = buffers.get(name, {})
        return _values(self.params, params) | _values(self.rest, jax.tree.map(lambda leaf: leaf[number], buffers))

    def run(self, held: dict[str, Any], x: jax.Array, context: Context) -> jax.Array:
        """Returns the layer's output [b, t, e]. `held`: the result of `variables`."""
        return _run(self.graphdef, self.recorder, self._states(held), x, context)

    def record(self, held: dict[str, Any], hidden: Iterable[jax.Array], contexts: Iterable[Context]) -> Any:
        """Returns a dict from the name of each chosen kernel to its statistics over all batches."""
        found = {name: empty(kernel, self.recorder.hessian) for name, kernel in self.kernels.items()}
        states = self._states(held)
        for x, context in zip(hidden, contexts, strict=True):
            found = _record(self.graphdef, self.recorder, found, states, x, context)
        return found

    def quantize(self, held: dict[str, Any], found: Mapping[str, Statistics], quantize: Quantize) -> dict[str, Any]:
        """Quantizes the chosen kernels in `held`, in place. Returns their stored forms by canonical name."""
        stored = {}
        for name, kernel in self.kernels.items():
            stored[kernel.name], held[name] = _quantized(quantize, kernel, held[name], found[name])
        return stored

    def _states(self, held: dict[str, Any]) -> list[nnx.State]:
        with tree_mode():
            return [_filled(state, held) for state in (self.params, self.rest)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(graphdef: Any, recorder: Recorder, states: list[nnx.State], x: jax.Array, context: Context) -> jax.Array:
    return _traced(graphdef, recorder, states, x, context)[0]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _record(
    graphdef: Any,
    recorder: Recorder,
    before: dict[str, Statistics],
    states: list[nnx.State],
    x: jax.Array,
    context: Context,
) -> dict[str, Statistics]:
    _, found = _traced(graphdef, recorder, states, x, context)
    assert found.keys() == before.keys(), found.keys() ^ before.keys()
    return {name: before[name].plus(found[name]) for name in before}


def _traced(
    graphdef: Any, recorder: Recorder, states: list[nnx.State], x: jax.Array, context: Context
) -> tuple[jax.Array, dict[str, Statistics]]:
    """Runs the block. There is no dropout, so all layers can have the same context: `Context.at` would change only the
    dropout key."""
    with tree_mode():
        return recorder.collect(lambda: nnx.merge(graphdef, *states)(x, None, context)[0])


def _values(state: nnx.State, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict from the name of each variable of `state` to its value in the nested dict `tree`."""

    def at(path: Iterable[Any]) -> Any:
        found: Any = tree
        for name in path:
            found = found[str(name)]
        return found

    return {_name(path): at(path) for path, _ in nnx.to_flat_state(state)}


def _name(path: Iterable[Any]) -> str:
    """Returns the name of a variable, from its path in a module."""
    return "/".join(map(str, path))


def _filled(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """Returns `state` with new values. `values`: a dict from the name of each variable to its new value."""
    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, variable.replace(values[_name(path)])) for path, variable in flat])


def _module(make: Callable[[nnx.Rngs], Any], params: Mapping[str, Any]) -> Any:
    """Returns the module that `make` creates, with `params` as its parameters."""
    with tree_mode():
        graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        return nnx.merge(graphdef, _filled(state, _values(state, params)))


def _quantized(quantize: Quantize, kernel: Kernel, value: Any, found: Statistics) -> tuple[Any, jax.Array]:
    """Calls `quantize` for the array `value` of a kernel. Returns the kernel's stored form, and the dequantized kernel
    with the shape and dtype of `value`."""
    value = jnp.asarray(value)
    groups = (kernel.groups,) * bool(kernel.groups)
    stored, seen = quantize(kernel.name, value.reshape(*groups, math.prod(kernel.in_shape), -1), found)
    return stored, seen.reshape(value.shape).astype(value.dtype)


def _head(config: Config, texts: _Texts, read: Read, quantize: Quantize, hessian: bool) -> Layer:
    """Quantizes the matrix of an output head that is not the embedding table."""
    norm = _module(lambda rngs: make_norm(config), read("decoder/decoder_norm", None))
    path = "/".join(head_matrix(config)[:-1])
    dense = _module(lambda rngs: make_logits_dense(config, rngs), read(path, None))
    (name, kernel), *_ = dense.kernels().items()
    kernel = kernel._replace(name=f"{path}/{name}")
    found = empty(kernel, hessian)
    hidden = [norm(x) for x in texts.hidden]
    for x, context in zip(hidden, texts.contexts, strict=True):
        rows = x.astype(dense.dtype).reshape(-1, x.shape[-1])
        found = found.plus(of_rows(rows, (context.segments != 0).reshape(-1), hessian))
    stored, _ = _quantized(quantize, kernel, dense.kernel.get_value(), found)
    return Layer(path, None, {kernel.name: stored}, hidden)


def _without_tokens(found: Mapping[str, Statistics]) -> str:
    """Returns a note on the number of experts without tokens; "" if there are none."""
    counts = {name.rpartition("/")[0]: it.rows for name, it in found.items() if it.rows.ndim}
    unused = {layer: int((rows == 0).sum()) for layer, rows in counts.items()}
    return ", ".join(
        f"{n} of {len(counts[layer])} experts of {layer} received no tokens" for layer, n in unused.items() if n
    )
