"""The settings that each attention kernel supports, and the kernel that the key `attention` selects."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.config.capabilities.context_keys import AXES, parts, splits_rows
from trainer.config.capabilities.documents import most_documents
from trainer.config.capabilities.invariant_keys import OP
from trainer.config.capabilities.windows import has_window
from trainer.config.family import has_sinks
from trainer.config.keys import Config
from trainer.config.numbers import multiples_around
from trainer.config.rules import make_rules

FLASH_LENGTH = 1024  # tokens; from this length on, attention=autoselected uses the platform's kernel
ANY = ("cpu", "gpu", "tpu")
Capability = tuple[int, int]  # the CUDA compute capability of a GPU
HOPPER, BLACKWELL = 9, 10  # the major versions of the compute capability


@dataclass(frozen=True)
class Kernel:
    """The platforms and features that a kernel supports."""

    platforms: tuple[str, ...] = ANY
    dropout: bool = True
    soft_cap: bool = True
    window: bool = True
    sinks: bool = True  # supports attention sinks: a learned logit per head, in addition to the keys' logits
    unequal_widths: bool = True  # supports values and keys of different widths, as in multi-head latent attention
    segments: bool = True  # supports packed rows, whose documents do not attend to each other
    documents: int | None = 0  # the maximum number of document lengths that it accepts per row; None: no limit
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    length_multiple: int = 1
    head_dim_multiple: int = 1
    head_dim_most: int | None = None
    # Whether each device runs the kernel on its local rows and heads. If so, only a `Strategy` may split the tokens of
    # a row over devices, and query heads must be sharded like kv heads.
    per_device: bool = False
    over_cache: bool = False  # supports queries and keys at different positions, as in decoding
    further_widths: tuple[tuple[int, int], ...] = ()  # pairs (key width, value width) allowed beyond head_dim_most
    # The fields that differ on some GPUs, by the major version of their compute capability.
    by_capability: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def on(self, capability: Capability | None) -> "Kernel":
        """Returns the kernel's features on a GPU of this compute capability."""
        return self if capability is None else replace(self, **self.by_capability.get(capability[0], {}))


# The values of `attention` after resolve. The implementations are in ops/; tests compare each with dot_product.
KERNELS = {
    "dot_product": Kernel(over_cache=True),
    "blockwise": Kernel(),
    "invariant": Kernel(dropout=False, over_cache=True),
    "splash": Kernel(platforms=("tpu",), dropout=False, length_multiple=128, per_device=True),
    # Segments may be passed to cuDNN as a bias, and the backward pass of a bias needs an even row length. The widths
    # are limited by the backward pass in cuDNN's frontend (node/sdpa_support_surface.h). A soft cap would be a score
    # function, which cuDNN cannot combine with a causal mask or lengths.
    "cudnn_flash_jax": Kernel(
        platforms=("gpu",),
        dropout=False,
        soft_cap=False,
        sinks=False,
        unequal_widths=False,
        documents=1,
        dtypes=("bfloat16",),
        length_multiple=2,
        head_dim_multiple=8,
        head_dim_most=128,
        per_device=True,
        by_capability={
            HOPPER: {"documents": None, "head_dim_most": 256, "unequal_widths": True},
            BLACKWELL: {"documents": None, "unequal_widths": True, "further_widths": ((192, 128),)},
        },
    ),
}


@dataclass(frozen=True)
class Strategy:
    """The attention features that are available if the tokens of a row are split over devices.

    Attributes:
      kernels: the names of the kernels that can process the keys and values that devices exchange. Each kernel supports
        the same features as without the exchange.
      whole_rows: whether the exchange gives each device all tokens of its rows, for a part of the heads.
    """

    kernels: tuple[str, ...]
    whole_rows: bool = False


# Maps each value of `context_parallel_strategy` to its features. "usp" includes ring attention, which replaces the
# kernel and computes attention blockwise.
STRATEGIES = {
    "all_gather": Strategy(("dot_product", "blockwise", "splash")),
    "ring": Strategy(("blockwise",)),
    "ulysses": Strategy(tuple(KERNELS), whole_rows=True),
    "usp": Strategy(("blockwise",)),
}
# The kernel of attention=flash on each platform.
FLASH = {"cpu": "blockwise", "gpu": "cudnn_flash_jax", "tpu": "splash"}


def choose_attention(
    values: Config, mesh: Mapping[str, int], platform: str, capability: Capability | None = None
) -> tuple[str, list[str]]:
    """Returns the name of the kernel that the key `attention` selects, and a list, which contains a message if
    `attention` requests a kernel that does not support the configuration.

    `values` is a configuration with a resolved dtype. An empty `mesh` skips the checks that depend on the mesh.
    `capability` is the lowest compute capability of the NVIDIA GPUs; None if unknown.
    """
    if values.batch_invariant:
        return OP, []
    asked, strategy = values.attention, _strategy(values)
    if asked == "autoselected" and values.max_target_length < FLASH_LENGTH and "dot_product" in strategy.kernels:
        return "dot_product", []
    name = FLASH[platform] if asked in ("autoselected", "flash") else asked
    if asked in ("autoselected", "flash") and strategy.kernels == ("blockwise",):
        name = "blockwise"
    if asked == "autoselected":  # uses only features that have been run on a GPU (docs/benchmarks/gpu.md)
        return "blockwise" if _unmet(name, values, mesh, platform, None) else name, []
    if not (unmet := _unmet(name, values, mesh, platform, capability)):
        return name, []
    what = name if asked == name else f"on {platform} this is {name}, which"
    advice = "choose attention=autoselected or blockwise"
    return name, [f"attention={asked}: {what} does not support {', '.join(unmet)}; {advice}"]


def read_documents(config: Config, capability: Capability | None) -> int | None:
    """Returns `most_documents(config)`, the number of document lengths per row that the configured kernel should get.
    Returns None if the kernel should not get lengths."""
    most, reads = most_documents(config), KERNELS[config.attention].on(capability).documents
    if most is None or (reads is not None and (not reads or most > reads)):
        return None
    # With several documents, the kernel saves each head's statistics for each document. These statistics may take
    # more memory than a bias.
    if most > 1 and 2 * config.base_num_query_heads * (most + 1) > config.max_target_length:
        return None
    # With several documents, the kernel uses the same offsets for queries and results, so their widths must be equal.
    return most if most < 2 or len(set(_widths(config).values())) == 1 else None


def why_no_kernel(config: Config, mesh: Mapping[str, int], platform: str, capability: Capability | None = None) -> str:
    """Returns why the resolved `config` uses blockwise attention instead of the platform's kernel.

    Returns "" if the attention is not blockwise, or if the platform's kernel supports the configuration on every GPU.
    """
    name = FLASH[platform]
    if config.attention != "blockwise" or not (unmet := _unmet(name, config, mesh, platform, None)):
        return ""
    if here := _unmet(name, config, mesh, platform, capability):
        return f"{name} does not support {', '.join(here)}"
    return f"{name} has never been run with {', '.join(unmet)}; attention=flash uses it anyway"


def _strategy(values: Config) -> Strategy:
    return (
        STRATEGIES[values.context_parallel_strategy]
        if splits_rows(values)
        else Strategy(tuple(KERNELS), whole_rows=True)
    )


def _unmet(
    name: str, values: Config, mesh: Mapping[str, int], platform: str, capability: Capability | None
) -> list[str]:
    """Returns `unsupported` for the kernel `name`, preceded by a text about context_parallel_strategy if the kernel
    does not support that setting."""
    kernels = _strategy(values).kernels
    over = (
        []
        if name in kernels
        else [f"context_parallel_strategy={values.context_parallel_strategy} (only {', '.join(kernels)})"]
    )
    return [*over, *unsupported(KERNELS[name].on(capability), values, mesh, platform)]


def unsupported(kernel: Kernel, values: Config, mesh: Mapping[str, int], platform: str) -> list[str]:
    """Returns one text for each setting that the kernel does not support; it includes the supported values, if there
    are any."""
    length, dtype = values.max_target_length, values.dtype
    widths = _widths(values)
    dropout = values.attention_dropout_rate if values.enable_dropout else 0
    soft_cap = values.attn_logits_soft_cap
    window = has_window(values)
    shares = 1 if kernel.length_multiple == 1 else shares_of_queries(values)
    step, multiple, most = kernel.length_multiple * shares, kernel.head_dim_multiple, kernel.head_dim_most
    if tuple(widths.values()) in kernel.further_widths:
        most = None
    checks = (
        (platform in kernel.platforms, f"the platform {platform} (only {' and '.join(kernel.platforms)})"),
        (kernel.dropout or not dropout, f"attention_dropout_rate={dropout:g}"),
        (kernel.soft_cap or not soft_cap, f"attn_logits_soft_cap={soft_cap:g}"),
        (kernel.window or not window, f"sliding_window_size={values.sliding_window_size}"),
        (kernel.sinks or not has_sinks(values), f"the sinks of decoder_block={values.decoder_block}"),
        (kernel.unequal_widths or len(set(widths.values())) == 1, f"attention_type={values.attention_type}"),
        (kernel.segments, "packed documents"),
        (dtype in kernel.dtypes, f"dtype={dtype} (only {' and '.join(kernel.dtypes)})"),
        (length % step == 0, f"max_target_length={length} (only multiples of {step}{_shares(shares, length, step)})"),
        *((width % multiple == 0, f"{key}={width} (only multiples of {multiple})") for key, width in widths.items()),
        *((most is None or width <= most, f"{key}={width} (at most {most})") for key, width in widths.items()),
    )
    return [setting for supported, setting in checks if not supported] + _unmet_on_mesh(kernel, values, mesh)


def _widths(values: Config) -> dict[str, int]:
    """Returns a dict from the configuration keys that set the width of a head's keys and values to that width. Contains
    two widths with multi-head latent attention, otherwise one."""
    if values.attention_type != "mla":
        return {"head_dim": values.head_dim}
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    return {" + ".join(parts): sum(values[part] for part in parts), "v_head_dim": values.v_head_dim}


def shares_of_queries(values: Config) -> int:
    """Returns the number of devices over which an attention op splits the queries of a row."""
    return 1 if _strategy(values).whole_rows else parts(values)


def _shares(shares: int, length: int, step: int) -> str:
    if shares == 1:
        return ""
    return f" for {shares} devices, {step // shares} tokens each; nearest: {multiples_around(length, step)}"


def _unmet_on_mesh(kernel: Kernel, values: Config, mesh: Mapping[str, int]) -> list[str]:
    if not kernel.per_device or not mesh:
        return []
    rules = make_rules(values.logical_axis_rules)

    def split(name: str) -> tuple[str, ...]:
        return tuple(axis for axis in rules[name] if mesh[axis] > 1 and axis not in AXES)

    unmet = [
        f"sharded rows (rule of {name}: {', '.join(split(name))})"
        for name in ("activation_q_length", "activation_kv_length")
        if split(name)
    ]
    if split("activation_heads") != split("activation_kv_heads"):
        heads, kv_heads = (", ".join(split(name)) or "none" for name in ("activation_heads", "activation_kv_heads"))
        unmet.append(f"different rules of activation_heads ({heads}) and activation_kv_heads ({kv_heads})")
    return unmet
