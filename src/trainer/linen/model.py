"""The combinations of model, decoder stack and train state that use Linen."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, traverse_util
from flax.training import train_state

from trainer.backends.base import tree_mode
from trainer.backends.nnx_model import NNXModel
from trainer.backends.permutation import Permutation
from trainer.config.capabilities.pipeline_keys import microbatches
from trainer.config.keys import Config
from trainer.layers.sown import Sown
from trainer.layers.stack import Stack
from trainer.linen.bridge import capturing, is_box, to_linen, unboxed
from trainer.linen.decoder import LinenStackDecoder, initial_decoder
from trainer.linen.layer import COLLECTIONS, check_layer
from trainer.linen.stack import initializing
from trainer.linen.transformer import Transformer
from trainer.models import transformer
from trainer.models.families import leading_axes, stacks
from trainer.models.init import init_variables
from trainer.ops.paths import Path, name_of
from trainer.ops.random import seed_key
from trainer.sharding import Axes, axes_of_parts


class NNXLinenDecoder(NNXModel):
    """NNX model and NNX train state with a Linen decoder stack."""

    decoder = LinenStackDecoder

    def __init__(self, config: Config):
        with tree_mode():
            check_layer(config)
        super().__init__(config)

    def _initial_decoder(self) -> type[transformer.Decoder]:
        return initial_decoder(self.config)


class TrainState(train_state.TrainState):
    """Flax's TrainState with `rest`, the variables of collections other than params."""

    rest: Any


class Linen:
    """Linen model and Linen TrainState. See `backends.Model`."""

    def __init__(self, config: Config):
        self.config = config
        with tree_mode():
            check_layer(config)
        self.module = self._make_module(config)
        rows = microbatches(config)  # a pipeline needs a row for each microbatch
        id_bt, row_b = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)
        with tree_mode():
            init = self._make_module(initializing(config)).init
            made = jax.eval_shape(init, seed_key(0), id_bt, id_bt, id_bt, row_b)
        boxed = {name: part for name, part in made.items() if name in COLLECTIONS}  # without sown values
        axes = functools.partial(_axes, stacks(config))
        self.param_axes = jax.tree_util.tree_map_with_path(axes, boxed["params"], is_leaf=is_box)
        self.rest_axes = jax.tree.map(_axes_of_buffer, _merged(_parts(boxed)[1]), is_leaf=is_box)
        variables = linen.unbox(boxed)
        self._params, self._rest = _parts(variables)
        self.abstract = self._params, _merged(self._rest)
        merged = {"params": self._params, "rest": self.abstract[1]}
        self._variables = Permutation(variables, merged, _canonical_variable)

    def _make_module(self, config: Config) -> linen.Module:
        return Transformer(config)

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        with tree_mode():
            return init_variables(self.config, key, initial_decoder(self.config))

    def abstract_train_state(self, tx: optax.GradientTransformation) -> TrainState:
        return TrainState(
            step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
            apply_fn=self.module.apply,
            params=self._params,
            tx=tx,
            opt_state=jax.eval_shape(tx.init, self._params),
            rest=self._rest,
        )

    def canonical(self, path: Path) -> Path:
        return path[:1] + path[2:] if path[0] == "rest" else path

    def apply(self, params, rest, *inputs, method="hidden", capture=(), **given) -> tuple[Any, Sown, Any]:
        """See `Model.apply`. `given`: further arguments of the method "hidden"."""
        variables = self._variables.pack({"params": params, "rest": rest})
        with tree_mode():
            if method == "head":
                return self._head(variables, *inputs), {}, None
            (out, cache), sown = self._call(variables, method, capture, *inputs, **given)
            return out, sown, cache

    def _head(self, variables, x):
        return self.module.apply(variables, x, method="head")

    def _call(self, variables, method, types, *args, **given) -> tuple[Any, Sown]:
        names = [variable_type.__name__ for variable_type in types]
        result, sown = self.module.apply(variables, *args, types=types, **given, method=method, mutable=names)
        flat = {name: traverse_util.flatten_dict(sown.get(name, {}), sep="/") for name in names}
        return result, flat


class Bridged(Linen):
    """NNX model, bridged into Linen, with a Linen TrainState."""

    decoder = transformer.Decoder

    def _make_module(self, config: Config) -> linen.Module:
        return to_linen(transformer.Transformer, config, kwargs={"decoder": self.decoder})

    def _head(self, variables, x):
        return self.module.apply(variables, x, nnx_method="head")

    def _call(self, variables, method, types, *args, **given) -> tuple[Any, Sown]:
        return self.module.apply(variables, *args, types=types, **given, nnx_method=capturing(types, method))


class BridgedLinenDecoder(Bridged):
    """NNX model with a Linen decoder stack, bridged into Linen, with a Linen TrainState."""

    decoder = LinenStackDecoder


def _axes(stacks: Sequence[Stack], path: tuple[Any, ...], parameter: Any) -> Any:
    value, axes = unboxed(parameter, leading_axes(stacks, name_of(path)))
    return axes_of_parts(axes, value, name_of(path))


def _axes_of_buffer(buffer: Any) -> Axes:
    return Axes(buffer.names if is_box(buffer) else (None,) * buffer.ndim)


def _parts(variables: Any) -> tuple[Any, Any]:
    """Splits Linen variables into params and all other collections."""
    return variables["params"], {name: part for name, part in variables.items() if name != "params"}


def _merged(rest: dict[str, dict]) -> dict:
    """Merges the collections of `rest` into one tree, because canonical names do not contain the collection."""
    flat = {path[1:]: leaf for path, leaf in traverse_util.flatten_dict(rest).items()}
    return traverse_util.unflatten_dict(flat)


def _canonical_variable(path: Path) -> Path:
    return path if path[0] == "params" else ("rest", *path[1:])
