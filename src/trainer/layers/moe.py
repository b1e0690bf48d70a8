"""Mixture of experts: a router chooses a few feed-forward layers for each token."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.layers.dense import INPUT, RESIDUAL, ROWS, Dense
from trainer.layers.matrices import WithMatrices
from trainer.layers.mlp import MLP, Combine, hidden_units
from trainer.layers.param import EXACT, Buffer, lecun_normal, param
from trainer.layers.sown import Activation, RouterCount, RouterLoss, captures, sow
from trainer.ops import exchange
from trainer.ops.experts import Apply, Dispatched, dropless, every_expert, weighing_inputs, with_bias, within_capacity
from trainer.ops.routing import Routing, Score, entropy, load_balance, squared_log_z, tokens_per_expert, weight_of_each
from trainer.products.context import Context
from trainer.products.plain import Kernel, grouped_product, in_dtype, stored

IN, OUT = sharding.Axes(("exp", "embed_moe", "mlp")), sharding.Axes(("exp", "mlp", "embed_moe"))
LOGITS = sharding.Axes((*ROWS, None))
# Inside `shard_mapped`, a device has complete rows, some of the experts, and a share of these experts' hidden units.
# The layer's result is the sum of the devices' partial results.
_TOKENS, _PER_TOKEN, _PER_ROW = LOGITS, ROWS, sharding.Axes(("activation_batch",))
_SHARES = {"exp": "exp", "mlp": "activation_mlp"}  # other axes of matrices are not sharded
_BIAS = sharding.Axes((None,))
_BIASES = {"wi_0_bias": sharding.Axes(("exp", "mlp")), "wi_1_bias": sharding.Axes(("exp", "mlp"))}
_BIASES |= {"wo_bias": sharding.Axes(("exp", "embed_moe"))}
_PARTS = sharding.Axes(("activation_mlp", *LOGITS))


class MoE(WithMatrices):
    """The weighted sum of the results of each token's chosen experts (Shazeer et al. 2017, arXiv:1701.06538). An expert
    is a gated MLP: it applies each activation to a separate projection of the input, multiplies the results, and
    projects their product back to the input's width.

    The router is computed in float32. The experts' matrices are stacked: wi_0 and wi_1 [experts, width, hidden], wo
    [experts, hidden, width]. They are initialized as in `Dense`.

    With `bias`, the router has the parameter gate/bias [experts], and each matrix of the experts has an output bias:
    wi_0_bias, wi_1_bias and wo_bias [experts, outputs]. They are float32 and initially 0.

    With `routed_bias`, the router has a bias per expert, gate/bias, float32 and initially 0. The function `score` adds
    this bias to the scores when it selects experts. The bias is a buffer without a gradient; an update rule changes it
    (`optim.router_bias`).

    This layer sows
    - as RouterLoss: `load_balance` and `z`, sums of `ops.routing.load_balance` and `ops.routing.squared_log_z`;
    - as RouterCount: `tokens_per_expert`, int32 [experts]; `tokens`, int32; `entropy`, summed over tokens, in nats;
      `dropped`, int32, the number of pairs of a token and a chosen expert that dropped the token
      (`ops.experts.within_capacity`);
    - as Activation: `expert_logits` and `expert_weights`, [b, t, experts]; experts that are not chosen have weight 0.

    RouterLoss and RouterCount exclude padding; Activation includes it.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activations: Sequence[str],
        *,
        experts: int,
        chosen: int,
        score: Score,
        sparse: bool,
        capacity_factor: float,
        buffer: float = 1.5,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        bias: bool = False,
        routed_bias: bool = False,
        by_sigmoid: bool = False,
        weighs_inputs: bool = False,
        combine: Combine | None = None,
        rngs: nnx.Rngs,
    ):
        """
        Args:
          chosen: the number of experts per token.
          score: chooses each token's experts and their weights (`ops.routing.Score`).
          sparse: whether to use grouped products, which drop no token. If false: with a positive `capacity_factor`,
            each expert drops tokens beyond its capacity; otherwise, every expert processes every token.
          buffer: see `ops.exchange.round_size`.
          by_sigmoid: whether scores are sigmoids, which the load-balance loss and the entropy normalize to sum to 1.
          weighs_inputs: whether the weights of experts multiply the experts' inputs instead of the results.
          combine: see `MLP`.
        """
        self.combine = combine
        self.experts, self.chosen, self.score = experts, chosen, score
        assert not (bias and routed_bias)
        self.by_sigmoid, self.routed_bias, self.weighs_inputs = by_sigmoid, routed_bias, weighs_inputs
        self.sparse, self.capacity_factor, self.buffer = sparse, capacity_factor, buffer
        self.activations, self.dtype = tuple(activations), dtype
        self.gate = Dense(
            [width],
            [experts],
            ("embed_moe", "exp"),
            dtype=jnp.dtype(jnp.float32),
            weight_dtype=weight_dtype,
            bias=bias,
            rngs=rngs,
        )
        if routed_bias:
            self.gate.bias = Buffer(jnp.zeros(experts, jnp.float32))  # MaxText's name
        for name in self._projections():
            drawn = lecun_normal(rngs.params(), (experts, width, hidden), weight_dtype, batch_axis=(0,))
            setattr(self, name, param(drawn, IN))
        drawn = lecun_normal(rngs.params(), (experts, hidden, width), weight_dtype, batch_axis=(0,))
        self.wo = param(drawn, OUT)
        self.biases = [f"{name}_bias" for name in self._matrices()] if bias else []
        for name in self.biases:
            outputs = width if name == "wo_bias" else hidden
            setattr(self, name, param(jnp.zeros((experts, outputs), EXACT), _BIASES[name]))
        self.product = _Products(self._matrices())

    def _projections(self) -> list[str]:
        return [f"wi_{i}" for i in range(len(self.activations))]

    def _matrices(self) -> list[str]:
        return [*self._projections(), "wo"]

    def kernels(self) -> dict[str, Kernel]:
        shapes = {name: getattr(self, name).get_value().shape[1:] for name in self._matrices()}
        return {
            name: Kernel((inputs,), (outputs,), _axes_of(name), self.experts)
            for name, (inputs, outputs) in shapes.items()
        }

    def use(self, name: str, product: Any) -> None:
        """See `WithMatrices`. The product's parameters are stored under product/NAME."""
        setattr(self.product, name, product)
        kernel = getattr(self, name)
        kernel.set_value(stored(getattr(self.product, name), kernel.get_value()))

    def __call__(self, x_bte: jax.Array, context: Context) -> jax.Array:
        """[b, t, width] -> [b, t, width]."""
        x_bte = sharding.constrain(x_bte, INPUT)
        # By default a TPU multiplies float32 as bfloat16, and a GPU as TF32.
        with jax.default_matmul_precision("float32"):
            logits = self.gate(x_bte, LOGITS, context)
        real_bt = context.segments != 0
        # Cast before the all-gather. Without the constraint below, XLA would cast after the all-gather.
        kernels = {name: in_dtype(getattr(self, name).get_value(), self.dtype) for name in self._matrices()}
        kernels |= {name: getattr(self, name).get_value() for name in self.biases}
        values, axes, merged = self.product.split()
        held = kernels, values
        whole = {name: _axes_of(name) for name in kernels}, axes
        names = jax.tree.map(sharding.axes_of_parts, whole, held)
        held = jax.tree.map(lambda axes, part: sharding.constrain(part, axes), names, held)
        held = jax.tree.map(lambda axes, value: sharding.with_own_tiles(_inside(axes), value, "experts"), whole, held)
        inside = jax.tree.map(_inside, names)
        seen = None if self.product.plain() else context
        seen_inside = jax.tree.map(lambda x: sharding.Axes(ROWS[: x.ndim]), seen)
        bias = [self.gate.bias.get_value()] if self.routed_bias else []

        def experts(held: Any, rows: jax.Array, sizes: jax.Array | None) -> jax.Array:
            (kernels, values), context = held
            return self._experts(merged(values), kernels, context, rows, sizes)

        run = sharding.shard_mapped(
            lambda *args: self._run(experts, *args),
            (_TOKENS, _TOKENS, _PER_TOKEN, [_BIAS] * len(bias), (inside, seen_inside)),
            (_PARTS, _TOKENS, _TOKENS, _PER_ROW),
            check=False,
        )
        parts, expert_btk, weight_btk, dropped_b = run(x_bte.astype(self.dtype), logits, real_bt, bias, (held, seen))
        self._sow(logits, Routing(expert_btk, weight_btk), real_bt, dropped_b)
        return sharding.constrain(parts.sum(0), RESIDUAL)

    def _run(
        self,
        experts: exchange.Experts,
        x_btw: jax.Array,
        logits: jax.Array,
        real_bt: jax.Array,
        bias: list[jax.Array],
        held: Any,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Runs on one device, for the device's rows and share of the hidden units. Returns a partial result with a
        leading device axis, the experts of each token, the weights of these experts, and the number of dropped choices
        per row."""
        routing = self.score(logits, self.chosen, *bias)
        apply: Apply = functools.partial(experts, held)
        own, rows = sharding.mesh_axes("exp"), sharding.mesh_axes("activation_batch")
        spread = exchange.Spread(own, tuple(dict.fromkeys((*rows, *own))), self.buffer)
        if spread.devices > 1:
            apply = exchange.on_owners(apply, spread)
        found: Dispatched
        how: Callable[[Callable[..., Dispatched]], Callable[..., Dispatched]]
        how = weighing_inputs if self.weighs_inputs else lambda dispatch: dispatch
        if self.sparse and spread.devices > 1:
            found = how(exchange.dropless)(x_btw, routing, experts, held, self.experts, spread)
        elif self.sparse:
            found = how(dropless)(x_btw, routing, apply, self.experts)
        elif self.capacity_factor <= 0:
            found = how(every_expert)(x_btw, routing, apply, self.experts)
        else:
            factor = self.capacity_factor
            found = how(within_capacity)(x_btw, routing, apply, self.experts, real_bt=real_bt, factor=factor)
        return found.out.astype(self.dtype)[None], *routing, found.dropped

    def _experts(
        self, products: Any, kernels: Any, context: Context | None, rows: jax.Array, sizes: jax.Array | None
    ) -> jax.Array:
        """Implements `ops.experts.Apply`."""

        def product(name: str, rows: jax.Array) -> jax.Array:
            out = getattr(products, name)(rows, kernels[name], sizes, context)
            if self.biases:
                bias = kernels[f"{name}_bias"]
                out = with_bias(out, _on_first(bias) if name == "wo" else bias, sizes)
            return checkpoint_name(out, f"moe_mlp{name}")

        hidden = hidden_units((product(name, rows) for name in self._projections()), self.activations, self.combine)
        return product("wo", hidden)

    def _sow(self, logits: jax.Array, routing: Routing, real_bt: jax.Array, dropped_b: jax.Array) -> None:
        # softmax(share) is each expert's share of the token's total score.
        share = jax.nn.log_sigmoid(logits) if self.by_sigmoid else logits
        if captures(self, RouterLoss):
            sow(self, RouterLoss, "load_balance", load_balance(share, routing.expert, real_bt).sum())
            sow(self, RouterLoss, "z", squared_log_z(logits, real_bt).sum())
        if captures(self, RouterCount):
            count_be = tokens_per_expert(routing.expert, real_bt, self.experts)
            sow(self, RouterCount, "tokens_per_expert", count_be.sum(0))
            sow(self, RouterCount, "tokens", real_bt.sum(dtype=jnp.int32))
            sow(self, RouterCount, "entropy", entropy(share, real_bt).sum())
            sow(self, RouterCount, "dropped", dropped_b.sum())
        if captures(self, Activation):
            sow(self, Activation, "expert_logits", logits)
            sow(self, Activation, "expert_weights", weight_of_each(routing, self.experts))


class _Products(nnx.Module):
    """The products with the experts' matrices. Each product is an attribute with the name of its matrix."""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        for name in names:
            setattr(self, name, grouped_product)

    def plain(self) -> bool:
        """Returns whether every product is the plain one."""
        return all(getattr(self, name) is grouped_product for name in self.names)

    def split(self) -> tuple[list[Any], list[sharding.Axes], Callable[[list[Any]], Any]]:
        """Returns a list of the products' parameters and buffers, a list of their logical axes, and a function that
        makes products from a list of parameters and buffers."""
        graphdef, *states = nnx.split(self, (nnx.Param, Buffer), ...)
        own = nnx.to_flat_state(states[0])

        def merged(values: list[Any]) -> Any:
            replaced = [(path, variable.replace(value)) for (path, variable), value in zip(own, values, strict=True)]
            return nnx.merge(graphdef, nnx.from_flat_state(replaced), *states[1:])

        return [variable.get_value() for _, variable in own], [_own_axes(variable) for _, variable in own], merged


def _axes_of(name: str) -> sharding.Axes:
    return _BIASES.get(name) or (OUT if name == "wo" else IN)


def _on_first(bias: jax.Array) -> jax.Array:
    """Returns `bias` on the first device and zeros on the others, because the devices' results are summed."""
    axes = sharding.mesh_axes("activation_mlp")
    return jnp.where(jax.lax.axis_index(axes) == 0, bias, 0) if axes else bias


def _inside(axes: sharding.Axes) -> sharding.Axes:
    """Returns the names of `axes` inside `shard_mapped`, where an axis without a name is not sharded."""
    return sharding.Axes(None if name is None else _SHARES.get(name) for name in axes)


def _own_axes(variable: nnx.Variable) -> sharding.Axes:
    """Returns the axes of a product's parameter in one layer, without layer axes that its metadata may contain."""
    ndim = max(part.ndim for part in jax.tree.leaves(variable.get_value()))
    names = variable.get_metadata().get("out_sharding") or (None,) * ndim
    return sharding.Axes(names[len(names) - ndim :])


class SharedMoE(nnx.Module):
    """The sum of a mixture of experts and of shared experts, which process every token (DeepSeekMoE, arXiv:2401.06066).
    The shared experts are computed as one gated MLP of their total width."""

    def __init__(self, routed: MoE, shared: MLP):
        self.MoeBlock_0, self.shared_experts = routed, shared  # MaxText's names

    def __call__(self, x_bte: jax.Array, context: Context) -> jax.Array:
        """[b, t, width] -> [b, t, width]."""
        return self.MoeBlock_0(x_bte, context) + self.shared_experts(x_bte, context)


class GatedSharedMoE(nnx.Module):
    """A mixture of experts plus a shared expert (Qwen2-MoE, arXiv:2407.10671). The result of the shared expert is
    multiplied by the sigmoid of a projection of the input to one number."""

    def __init__(self, routed: MoE, shared: MLP, gate: Dense):
        self.routed_experts, self.shared_expert, self.shared_expert_gate = routed, shared, gate  # MaxText's names

    def __call__(self, x_bte: jax.Array, context: Context) -> jax.Array:
        """[b, t, width] -> [b, t, width]."""
        gate = jax.nn.sigmoid(self.shared_expert_gate(x_bte, LOGITS, context))
        return self.routed_experts(x_bte, context) + gate * self.shared_expert(x_bte, context)
