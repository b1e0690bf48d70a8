"""Sharding: the mesh, the rules from logical axis names to mesh axes, and the functions that layers use."""

from trainer.config import make_rules
from trainer.sharding.context import (
    MAPPED,
    constrain,
    for_product,
    mesh_axes,
    off_mesh,
    on_mesh,
    on_platform,
    on_tpu,
    reduce_gradient_early,
    same_mesh,
    shard_mapped,
    shards,
    sum_dtype,
    take,
)
from trainer.sharding.mesh import get_mesh_from_config, make_mesh, side_devices, slice_count
from trainer.sharding.parts import LAYERS, axes_of_parts, kept_axes, with_own_tiles
from trainer.sharding.rules import Axes, Rules, axes_of, entry, memory_order, named_sharding, spec

__all__ = [
    "LAYERS",
    "MAPPED",
    "Axes",
    "Rules",
    "axes_of",
    "axes_of_parts",
    "constrain",
    "entry",
    "for_product",
    "get_mesh_from_config",
    "kept_axes",
    "make_mesh",
    "make_rules",
    "memory_order",
    "mesh_axes",
    "named_sharding",
    "off_mesh",
    "on_mesh",
    "on_platform",
    "on_tpu",
    "reduce_gradient_early",
    "same_mesh",
    "shard_mapped",
    "shards",
    "side_devices",
    "slice_count",
    "spec",
    "sum_dtype",
    "take",
    "with_own_tiles",
]
