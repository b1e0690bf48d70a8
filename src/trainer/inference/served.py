"""A model on devices, without an optimizer, for generating text."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from trainer.backends.base import Model
from trainer.backends.registry import make_model
from trainer.config.capabilities.context_keys import AXES, LENGTHS
from trainer.config.capabilities.expert_keys import drops
from trainer.config.capabilities.pipeline_keys import SIZES
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.inference.adapters import with_adapters
from trainer.models.caches import takes_cache
from trainer.models.families import axis_rules
from trainer.sharding import Rules, hardware, make_mesh, named_sharding, on_mesh, spec
from trainer.weights.adapters import Adapters

# Generation does not shard the tokens of a row, because they are added one by one. Mesh axes that shard tokens in
# training shard rows instead.
_ROWS = "activation_batch"


class Served(NamedTuple):
    """A model and its mesh.

    Attributes:
      config: the resolved configuration.
      rules: the sharding rules for a batch of rows.
      slots: the number of sequences that are generated at once.
      ranks: bool [adapters + 1, ranks]; which ranks of the concatenated adapter belong to each adapter. The first row,
        for no adapter, is all false (`inference.adapters`). None if sequences cannot select adapters.
      controls: whether each sequence has separate penalties, biases and log-probabilities (`inference.controls`).
    """

    config: Config
    mesh: Mesh
    rules: Rules
    model: Model
    slots: int
    ranks: np.ndarray | None = None
    controls: bool = False

    @property
    def platform(self) -> str:
        """The platform of the devices: cpu, gpu or tpu."""
        return str(self.mesh.devices.flat[0].platform)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, spec([], self.rules))

    def sharding(self, names: Sequence[str | None], shape: Sequence[int], *, one_row: bool = False) -> NamedSharding:
        """Returns the sharding of an array with the logical axes `names`. `one_row`: see `on_mesh`."""
        return named_sharding(self.mesh, names, shape, self._rules(one_row))

    @property
    def abstract_variables(self) -> tuple[Any, Any]:
        """The model's (params, rest): a ShapeDtypeStruct with a sharding at each leaf."""

        def array(it: jax.ShapeDtypeStruct, names: Sequence[str | None]) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(it.shape, it.dtype, sharding=self.sharding(names, it.shape))

        return jax.tree.map(array, self.model.abstract, (self.model.param_axes, self.model.rest_axes))

    def on_mesh(self, fn: Callable[..., Any], *, one_row: bool = False) -> Callable[..., Any]:
        """Wraps `fn` so that layers shard arrays over the mesh while `fn` is traced. With `one_row`, they do not shard
        rows."""
        return on_mesh(self.mesh, self._rules(one_row))(fn)

    def _rules(self, one_row: bool) -> Rules:
        return {**self.rules, **dict.fromkeys(LENGTHS, ()), _ROWS: () if one_row else _row_axes(self.rules)}


def row_parts(mesh: Mesh, rules: Rules) -> int:
    """Returns the number of devices of `mesh` over which concurrent sequences are sharded. `rules`: see `Served`."""
    return math.prod(mesh.shape[axis] for axis in _row_axes(rules))


def _row_axes(rules: Rules) -> tuple[str, ...]:
    return *rules[_ROWS], *(axis for axis in AXES if axis in rules["activation_length"] and axis not in rules[_ROWS])


def serve(
    config: Config,
    devices: Sequence[jax.Device],
    sequences: int | None = None,
    adapters: Sequence[Adapters] = (),
    controls: bool = False,
) -> Served:
    """Returns the model of `config` on `devices`.

    It has per_device_batch_size slots for each device, or `sequences` slots if that is less. The number of slots is
    rounded up to a multiple of the number of devices that share the slots.

    Args:
      config: resolved or not.
      adapters: adapters for the model of `config`; with several, each sequence selects one.
      controls: see `Served`. If true, each sequence selects its adapter even if there is only one adapter.

    Raises:
      UserError: the configuration does not fit the devices, the model cannot generate text, or the adapters cannot be
        served together.
    """
    if staged := [f"{key}={config[key]}" for key in SIZES if config[key] != 1]:
        raise UserError(f"{' '.join(staged)}: generation has no pipeline; assign the devices to data, fsdp or tensor")
    # Multi-token prediction modules are only for training.
    values = dict(config.items()) | {"mtp_num_layers": 0, "mtp_eval_target_module": 0}
    config = for_decoding(resolve(values, **hardware(devices)), devices[0].platform)
    if not takes_cache(config):
        raise UserError(f"decoder_block={config.decoder_block} has no init_cache: the model cannot generate text")
    mesh, rules = make_mesh(config, devices), axis_rules(config)
    if config.batch_invariant and mesh.shape["fsdp"] > 1:
        raise UserError(
            f"batch_invariant=true: fsdp has {mesh.shape['fsdp']} devices, which would share the one row of a "
            "prompt; generate "
            "with ici_fsdp_parallelism=1 ici_data_parallelism=-1"
        )
    parts = row_parts(mesh, rules)  # more than in training if devices share rows there
    slots = round(config.per_device_batch_size * mesh.size)
    slots = math.ceil(min(slots, slots if sequences is None else sequences) / parts) * parts
    ranks = None
    if adapters:
        config, ranks = with_adapters(config, adapters, apart=controls)
    return Served(config, mesh, rules, make_model(config), slots, ranks, controls)


def for_decoding(config: Config, platform: str) -> Any:
    """Returns the resolved `config`, adapted to generating text on devices of `platform`: `decoding_loop` determines
    the loop over layers, and experts drop no token.

    Whether an expert drops a token depends on the other tokens of the row, including padding, but the results of a
    sequence must not depend on its padding.
    """
    own = {"sparse_matmul": True, "capacity_factor": -1.0} if drops(config) else {}
    if (scan := decoding_loop(config, platform)) != config.scan_layers:
        own["scan_layers"] = scan
    return Config({**config, **own}) if own else config


def decoding_loop(config: Config, platform: str) -> bool:
    """Returns whether prefill and decode steps roll the loop over layers. A rolled loop reads stacked weights; an
    unrolled loop reads separate arrays for each layer (`inference.weights`).
    docs/decisions/0027-weights-of-decoding.md has the measurements."""
    # On a TPU, a rolled loop copies experts' weights before the kernel that multiplies by them. So models with experts
    # have an unrolled loop, except with MLA, where unrolling needs large temporaries.
    copied = config.num_experts > 1 and config.attention_type != "mla"
    unrolled = platform == "cpu" or (platform == "tpu" and copied)
    # With batch_invariant, results must have the same bits as in training, so the loop must be the same.
    return config.scan_layers and (config.batch_invariant or not unrolled)


def longest_prompt(config: Config) -> int:
    """Returns the maximum number of tokens of a prompt. At least one more token can then be generated."""
    longest, given = config.max_target_length - 1, config.max_prefill_predict_length
    return longest if given < 0 else min(longest, given)
