"""Low-rank adapters (LoRA): which products of a model have adapters, and how adapters are merged into parameters."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from trainer.config.capabilities.lora_keys import ADAPTER, LAYERS, A, B
from trainer.config.capabilities.quantization_keys import STORED_DTYPES
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.layers.adapted import Adapted, GroupedAdapted, delta
from trainer.layers.param import EXACT
from trainer.models.quantization import named
from trainer.ops.paths import whole_name
from trainer.products.dequantized import Storage, dequantized
from trainer.products.plain import GroupedProduct, Kernel, Product, Rules, make_plain, make_wide, maker


def storage_of_base(config: Config) -> Storage:
    """Returns the format in which QLoRA stores matrices that have an adapter."""
    return Storage(STORED_DTYPES[config.lora_weight_qtype], (config.lora_tile_size, 1))


def is_adapted(config: Config, name: str) -> bool:
    """Returns whether the matrix `name` has an adapter."""
    return bool(config.enable_lora and re.search(named(config.lora_module_path or LAYERS), whole_name(name)))


def with_adapters(config: Config, rules: Rules) -> Rules:
    """Returns `rules` with an adapter added to the product of each chosen matrix; without LoRA, `rules` unchanged."""
    return [("", functools.partial(_adapted, config, rules))] if config.enable_lora else rules


def _adapted(config: Config, rules: Rules, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    make = maker(rules, kernel.name) or make_plain
    if not is_adapted(config, kernel.name):
        return make(kernel, rngs=rngs)
    if kernel.name == "token_embedder/embedding":
        raise UserError(
            f"lora_module_path={config.lora_module_path} matches {kernel.name}: tokens are looked up in the "
            "table of a tied head, and "
            "an adapter changes only a product; choose other matrices, as with decoder/.*"
        )
    if config.lora_weight_qtype and not config.checkpoint_is_quantized:
        if make is not make_plain:
            raise UserError(
                f"lora_weight_qtype={config.lora_weight_qtype}: {kernel.name} has a custom product, which "
                "cannot be quantized"
            )
        make = functools.partial(dequantized, storage_of_base(config))
    inner = make(kernel, rngs=rngs)
    kind = GroupedAdapted if kernel.groups else Adapted
    of_parts = make_wide if config.batch_invariant else make_plain
    return kind(
        inner,
        kernel,
        rank=config.lora_rank,
        scale=config.lora_alpha / config.lora_rank,
        dtype=EXACT,
        rngs=rngs,
        make=of_parts,
    )


def kernel_of(name: str) -> str:
    """Returns the name of the matrix that the adapter parameter `name` adapts."""
    layer, _, own = name.rpartition("/product/")
    return f"{layer}/{own.partition('/')[0] if '/' in own else 'kernel'}"


def adapter_names(kernel: str) -> tuple[str, str]:
    """Returns the names of the adapter parameters a and b for the matrix `kernel`."""
    layer, _, name = kernel.rpartition("/")
    product = f"{layer}/product" if name == "kernel" else f"{layer}/product/{name}"
    return f"{product}/{A}", f"{product}/{B}"


def apply_lora_on_base_params(
    base_params: Mapping[str, Any], lora_params: Mapping[str, Any], lora_scale_factor: float = 1.0
) -> dict[str, Any]:
    """Returns `base_params` with each adapter added to its matrix.

    The sum is computed in float32 and rounded to the matrix's dtype.

    Args:
      base_params: a nested dict of canonical names. Its arrays are not modified.
      lora_params: the adapters' parameters, a nested dict of canonical names. Other parameters in `lora_params` replace
        those of the base.
      lora_scale_factor: lora_alpha / lora_rank.

    Raises:
      UserError: the base lacks an adapted matrix, or stores it quantized.
    """
    return _changed(base_params, lora_params, lora_scale_factor)


def unapply_lora_from_base_params(
    base_params: Mapping[str, Any],
    lora_params: Mapping[str, Any],
    lora_scale_factor: float = 1.0,
    *,
    kept: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Inverts `apply_lora_on_base_params`, with the same arguments, up to rounding.

    Parameters in `kept`, which may be the original base, are returned unchanged.

    Raises:
      UserError: as in `apply_lora_on_base_params`, or `kept` lacks a parameter that `lora_params` replaced.
    """
    adapters = {name: leaf for name, leaf in _flat(lora_params).items() if ADAPTER.search(name)}
    before = _flat(kept or {})
    if lost := [name for name in _flat(lora_params).keys() - adapters.keys() if name not in before]:
        raise UserError(f"{min(lost)} was replaced, so `kept` must contain it")
    found = _flat(_changed(base_params, _nested(adapters), -lora_scale_factor))
    return _nested({name: before.get(name, leaf) for name, leaf in found.items()})


def _changed(base: Mapping[str, Any], adapters: Mapping[str, Any], scale: float) -> dict[str, Any]:
    found, given = _flat(base), _flat(adapters)
    for name in given:
        if not ADAPTER.search(name):
            found[name] = given[name]
        elif name.endswith(A):
            kernel, other = kernel_of(name), f"{name.removesuffix(A)}{B}"
            if kernel not in found or other not in given:
                raise UserError(f"{name}: there is no {kernel} in the base, or no {other} in the adapters")
            if not isinstance(found[kernel], jax.Array | np.ndarray):
                raise UserError(f"{kernel} is stored quantized, and adapters can be added only to floats")
            exact = found[kernel].astype(jnp.float32)
            more = delta(given[name].astype(jnp.float32), given[other].astype(jnp.float32), scale, exact.ndim)
            found[kernel] = (exact + more).astype(found[kernel].dtype)
    return _nested(found)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(dict(tree), sep="/")


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.unflatten_dict(dict(flat), sep="/")
