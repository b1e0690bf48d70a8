"""Which products of a model have low-rank adapters (the keys of LoRA)."""

import functools
import re

import jax.numpy as jnp
from flax import nnx

from trainer.config import Config, UserError
from trainer.config.lora_keys import ALPHA, ENABLE, PATTERN, RANK, A, B
from trainer.layers.adapted import Adapted, GroupedAdapted
from trainer.models.quantization import HEAD, MTP, ROUTER, named
from trainer.products import GroupedProduct, Kernel, Product, Rules, make_plain, maker


def is_adapted(config: Config, name: str) -> bool:
    """Returns whether the matrix `name` has an adapter."""
    if not config[ENABLE]:
        return False
    if config[PATTERN]:
        return bool(re.search(named(config[PATTERN]), name))
    return not any(re.search(pattern, name) for pattern in (ROUTER, HEAD, MTP))


def with_adapters(config: Config, rules: Rules) -> Rules:
    """Returns `rules`, in which the products of the chosen matrices have an adapter each; `rules` without LoRA."""
    return [("", functools.partial(_adapted, config, rules))] if config[ENABLE] else rules


def _adapted(config: Config, rules: Rules, kernel: Kernel, *, rngs: nnx.Rngs) -> Product | GroupedProduct:
    inner = (maker(rules, kernel.name) or make_plain)(kernel, rngs=rngs)
    if not is_adapted(config, kernel.name):
        return inner
    if kernel.name == "token_embedder/embedding":
        raise UserError(
            f"{PATTERN}={config[PATTERN]} matches {kernel.name}: tokens are looked up in the table of a tied head, and "
            "an adapter changes only a product; choose other matrices, as with decoder/.*"
        )
    kind = GroupedAdapted if kernel.groups else Adapted
    scale, dtype = config[ALPHA] / config[RANK], jnp.dtype(config.weight_dtype)
    return kind(inner, kernel, rank=config[RANK], scale=scale, dtype=dtype, rngs=rngs)


def adapter_names(kernel: str) -> tuple[str, str]:
    """Returns the canonical names of the parameters a and b of an adapter of the matrix `kernel`."""
    layer, _, name = kernel.rpartition("/")
    product = f"{layer}/product" if name == "kernel" else f"{layer}/product/{name}"
    return f"{product}/{A}", f"{product}/{B}"
