"""The NNX backend: the train state is a TrainStateNNX, split into a flat nnx.State."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainer.backends.base import TrainTree, initial_tree, tree_mode
from trainer.backends.codec import Codec, Path
from trainer.backends.train_state import make_train_state
from trainer.layers import sown
from trainer.models.blocks import check_state
from trainer.models.transformer import Decoder, Transformer
from trainer.ops.random import seed_key
from trainer.sharding import Axes


class NNXBackend:
    """Serves the combinations whose train state is NNX. See `Backend`."""

    decoder: type[Decoder] = Decoder

    def __init__(self, config, tx: optax.GradientTransformation):
        self.config = config
        self.tx = tx
        with tree_mode():
            check_state(config)
            abstract = nnx.eval_shape(lambda: make_train_state(self._make_model(seed_key(0)), tx))
            self.graphdef, state = nnx.split(abstract)
            self.model_graphdef = nnx.graphdef(abstract.model)
            params, rest = nnx.state(abstract.model, nnx.Param, nnx.Not(nnx.Param))
        variables = {"params": nnx.to_pure_dict(params), "rest": nnx.to_pure_dict(rest)}
        tree = TrainTree(
            step=jax.ShapeDtypeStruct((), jnp.int32),
            opt_state=jax.eval_shape(tx.init, variables["params"]),
            **variables,
        )
        self._param_paths: set[Path] = {tuple(map(str, path)) for path, _ in nnx.to_flat_state(params)}
        self._codec = Codec(state, tree, self.canonical)
        self._model_codec = Codec(state["model"], variables, lambda path: self.canonical(("model", *path)))
        self.param_axes = _axes(params)

    def _make_model(self, key: jax.Array) -> Transformer:
        return Transformer(self.config, nnx.Rngs(params=key), self.decoder)

    def init(self, key: jax.Array, params: Any = None) -> nnx.State:
        """See `Backend.init`."""
        with tree_mode():
            return self.pack(initial_tree(self.config, self.tx, key, params, self._initial_decoder()))

    def _initial_decoder(self) -> type[Decoder]:
        return Decoder

    def unpack(self, native: nnx.State) -> TrainTree:
        """See `Backend.unpack`."""
        return self._codec.unpack(native)

    def pack(self, tree: TrainTree) -> nnx.State:
        """See `Backend.pack`."""
        return self._codec.pack(tree)

    def canonical(self, path: Path) -> Path:
        """See `Backend.canonical`."""
        return _canonical(path, self._param_paths)

    def apply(
        self, params, rest, *inputs, method="hidden", capture=(), cache=None, key=None
    ) -> tuple[Any, sown.Sown, Any]:
        """See `Backend.apply`."""
        with tree_mode():
            model = nnx.merge(self.model_graphdef, self._model_codec.pack({"params": params, "rest": rest}))
            if method == "head":
                return model.head(*inputs), {}, cache
            (out, cache), extra = sown.capture(model, capture, method)(*inputs, cache, key, capture)
            return out, extra, cache


def _canonical(path: Path, param_paths: set[Path]) -> Path:
    """From a path of a split TrainStateNNX to the TrainTree's."""
    root, *names = path[:-1]  # the last entry is the Variable's own: its value
    if root == "optimizer":
        return tuple(names)  # opt_state/... and step
    return ("params" if tuple(names) in param_paths else "rest", *names)


def _axes(params: nnx.State) -> dict:
    """The logical axis names that each Param carries, in the tree of params.

    Only a layer of somebody's own leaves axes without names, and all layers are stacked on their first axis.
    """

    def names(variable: nnx.Variable) -> Axes:
        return Axes(
            variable.get_metadata().get("out_sharding") or ("layers", *[None] * (variable.get_value().ndim - 1))
        )

    return jax.tree.map(
        names,
        nnx.to_pure_dict(params, extract_fn=lambda variable: variable),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
