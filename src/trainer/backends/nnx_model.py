"""The NNX model. Its native train state is the nnx.State that results from splitting a TrainStateNNX."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from flax import nnx

from trainer.backends.base import tree_mode
from trainer.backends.permutation import Permutation
from trainer.backends.train_state import TrainStateNNX, make_train_state
from trainer.config.keys import Config
from trainer.layers import sown
from trainer.layers.param import axes_of
from trainer.models.families import check_state, leading_axes, stacks
from trainer.models.init import init_variables
from trainer.models.transformer import Decoder, Transformer
from trainer.ops.paths import Path, name_of
from trainer.ops.random import seed_key
from trainer.sharding import Axes


class NNXModel:
    """The `Model` of the combinations of flags that have an NNX train state."""

    decoder: type[Decoder] = Decoder

    def __init__(self, config: Config):
        self.config = config
        with tree_mode():
            check_state(config)
            self._module = nnx.eval_shape(self._make)
            self._graphdef, state = nnx.split(self._module)
            params, rest = nnx.state(self._module, nnx.Param, nnx.Not(nnx.Param))
        self.abstract = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
        variables = {"params": self.abstract[0], "rest": self.abstract[1]}
        self._param_paths: set[Path] = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(params)}
        self._variables = Permutation(state, variables, lambda path: self.canonical(("model", *path)))
        named = functools.partial(leading_axes, stacks(config))
        self.param_axes, self.rest_axes = axes_of_params(params, named), axes_of_buffers(rest)

    def _make(self) -> Transformer:
        return Transformer(self.config, nnx.Rngs(params=seed_key(0)), self.decoder)

    def _initial_decoder(self) -> type[Decoder]:
        return Decoder

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        with tree_mode():
            return init_variables(self.config, key, self._initial_decoder())

    def apply(self, params, rest, *inputs, method="hidden", capture=(), **given) -> tuple[Any, sown.Sown, Any]:
        """See `Model.apply`. `given`: the keyword arguments of the method "hidden"."""
        with tree_mode():
            model = nnx.merge(self._graphdef, self._variables.pack({"params": params, "rest": rest}))
            if method == "head":
                return model.head(*inputs), {}, None
            (out, cache), extra = sown.capture(model, capture, method)(*inputs, types=capture, **given)
            return out, extra, cache

    def train_state_module(self, tx: optax.GradientTransformation) -> TrainStateNNX:
        """Returns a TrainStateNNX of ShapeDtypeStructs. Splitting it returns the abstract native train state."""
        with tree_mode():
            return nnx.eval_shape(lambda module: make_train_state(nnx.clone(module), tx), self._module)

    def abstract_train_state(self, tx: optax.GradientTransformation) -> nnx.State:
        with tree_mode():
            return nnx.state(self.train_state_module(tx))

    def canonical(self, path: Path) -> Path:
        return canonical(path, self._param_paths)


def canonical(path: Path, param_paths: set[Path]) -> Path:
    """Returns the path in the TrainTree of the leaf that is at `path` in a split TrainStateNNX.

    `param_paths`: the paths of the model's parameters.
    """
    root, *names = path
    if root == "optimizer":
        return tuple(names[:-1])  # opt_state/... or step, without the last entry, which selects the Variable's value
    for end in range(len(names)):
        if tuple(names[:end]) in param_paths:
            # names[end] selects the Variable's value. If the value is a pytree, the path continues after this entry.
            return ("params", *names[:end], *names[end + 1 :])
    return ("rest", *names[:-1])


def axes_of_params(params: nnx.State, leading: Callable[[str], Sequence[str]]) -> dict:
    """Returns nested dicts like params, with the logical axis names of each array.

    `leading`: a function from a parameter's name to the names of its leading axes, for parameters without axis names.
    """

    def names(path: tuple[Any, ...], variable: nnx.Variable) -> Any:
        return axes_of(variable, leading(name_of(path)), name_of(path))

    return _of_variables(names, params)


def axes_of_buffers(rest: nnx.State) -> dict:
    """Returns the logical axis names of each of a model's buffers: one None per axis for a buffer without axis
    names."""

    def names(path: tuple[Any, ...], variable: nnx.Variable) -> Axes:
        given = variable.get_metadata().get("out_sharding")
        return Axes(given or (None,) * variable.get_value().ndim)

    return _of_variables(names, rest)


def _of_variables(fn: Callable[..., Any], state: nnx.State) -> dict:
    """Returns nested dicts with the result of `fn(path, variable)` for each variable."""
    return jax.tree_util.tree_map_with_path(
        fn,
        nnx.to_pure_dict(state, extract_fn=lambda variable: variable),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
