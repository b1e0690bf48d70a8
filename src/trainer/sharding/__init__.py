"""Sharding: the mesh, the rules that map logical axis names to mesh axes, and the functions that layers use."""

from trainer.config.rules import make_rules
from trainer.sharding.capability import compute_capability, hardware, memory_kinds, slice_count, slice_of
from trainer.sharding.context import (
    MAPPED,
    capability_of_mesh,
    constrain,
    for_product,
    inside_stages,
    mesh_axes,
    off_mesh,
    on_mesh,
    on_platform,
    on_tpu,
    over_stages,
    same_mesh,
    shard_mapped,
    shards,
    splits_rows,
    sum_dtype,
)
from trainer.sharding.gradients import gathered_over_fsdp, reduce_gradient_early, with_gradient_over
from trainer.sharding.lookup import take
from trainer.sharding.mesh import get_mesh_from_config, make_mesh, side_devices
from trainer.sharding.parts import LAYERS, STACKED, STAGES, axes_of_parts, kept_axes, leading, with_own_tiles
from trainer.sharding.rules import Axes, Rules, axes_of, entry, memory_order, named_sharding, spec, without_fsdp

__all__ = [
    "LAYERS",
    "MAPPED",
    "STACKED",
    "STAGES",
    "Axes",
    "Rules",
    "axes_of",
    "axes_of_parts",
    "capability_of_mesh",
    "compute_capability",
    "constrain",
    "entry",
    "for_product",
    "gathered_over_fsdp",
    "get_mesh_from_config",
    "hardware",
    "inside_stages",
    "kept_axes",
    "leading",
    "make_mesh",
    "make_rules",
    "memory_kinds",
    "memory_order",
    "mesh_axes",
    "named_sharding",
    "off_mesh",
    "on_mesh",
    "on_platform",
    "on_tpu",
    "over_stages",
    "reduce_gradient_early",
    "same_mesh",
    "shard_mapped",
    "shards",
    "side_devices",
    "slice_count",
    "slice_of",
    "spec",
    "splits_rows",
    "sum_dtype",
    "take",
    "with_gradient_over",
    "with_own_tiles",
    "without_fsdp",
]
