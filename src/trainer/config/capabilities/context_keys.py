"""The keys of context parallelism, and their checks. Context parallelism splits the tokens of a row over devices."""

import math
from collections.abc import Callable

from trainer.config.capabilities.expert_keys import drops
from trainer.config.capabilities.quantization_keys import rounds
from trainer.config.derived import DCN, ICI, has_dropout, mesh_axes
from trainer.config.family import facts_of
from trainer.config.key_rows import Check, Inert, Resume, Row, only_if, refused
from trainer.config.keys import Config
from trainer.config.numbers import around, divisors, multiples_around
from trainer.config.rules import make_rules

KEYS = ("context_parallel_strategy", "context_parallel_load_balance", "context_parallel_reorder_strategy")
AXES = CONTEXT, ULYSSES = "context", "context_usp_ulysses"  # mesh axes; the first is the outer axis
SIZES = tuple(keys[axis] for axis in AXES for keys in (ICI, DCN))
CHUNKS = "dual_chunk_swap"
# The logical axes of a row's tokens in attention. Only the mesh axes AXES may shard them.
IN_ATTENTION = ("activation_q_length", "activation_kv_length")
LENGTHS = ("activation_length", *IN_ATTENTION, "activation_norm_length")
IN_ORDER = "set context_parallel_load_balance=false"


def parts(config: Config) -> int:
    """Returns the number of devices that share the tokens of a row. A mesh axis of unknown size counts as 1."""
    return math.prod(_size(config, axis) for axis in AXES)


def splits_rows(config: Config) -> bool:
    """Returns whether the tokens of a row are split over devices. A mesh axis of unknown size counts as 1."""
    return parts(config) > 1


def token_order(config: Config) -> tuple[str, int] | None:
    """Returns None if tokens are not reordered before they are split. Otherwise, returns a pair: the order
    (`dual_chunk_swap` or `striped`, see `trainer.ops.order`), and the size of the mesh axis CONTEXT, over which tokens
    are reordered."""
    n = _size(config, CONTEXT)
    # With ulysses, attention is split by heads, which all need the same work, so tokens are not reordered.
    if n == 1 or not config.context_parallel_load_balance or config.context_parallel_strategy == "ulysses":
        return None
    # `striped` also balances packed rows, but is not the default, because it computes more: docs/benchmarks/context.md.
    return CHUNKS if config.context_parallel_reorder_strategy == "auto" else config.context_parallel_reorder_strategy, n


def heads_axis(config: Config) -> str | None:
    """Returns the mesh axis over which each device exchanges a share of the tokens for a share of the heads in
    attention; None if there is no such axis."""
    return {"ulysses": CONTEXT, "usp": ULYSSES}.get(config.context_parallel_strategy)


def _size(config: Config, axis: str) -> int:
    return max(1, int(config[ICI[axis]] * config[DCN[axis]]))


def _product(config: Config, *axes: str) -> tuple[int, str]:
    """Returns the product of the sizes of the mesh axes `axes`, and a text with its calculation, such as "context 4 x
    tensor 2 = 8"."""
    sizes = {axis: size for axis in axes if (size := _size(config, axis)) > 1}
    count, shown = math.prod(sizes.values()), " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return count, f"{shown} = {count}" if len(sizes) > 1 else shown


def _length(config: Config) -> str | None:
    length, rules = config.max_target_length, make_rules(config.logical_axis_rules)
    wholes: dict[int, str] = {}
    for name in LENGTHS:
        count, shown = _product(config, *rules[name])
        wholes.setdefault(count, f"{shown} by the rule of {name}")
    order = token_order(config)
    if order and order[0] == CHUNKS:
        wholes.setdefault(2 * order[1], f"2 x {CONTEXT} {order[1]} = {2 * order[1]} chunks of {CHUNKS}")
    unmet = {count: shown for count, shown in wholes.items() if length % count}
    if not unmet:
        return None
    most = [shown for count, shown in unmet.items() if all(other % count for other in unmet if other != count)]
    nearest = multiples_around(length, math.lcm(*wholes))
    return f"a row must divide into equal parts: {' and '.join(most)}; nearest: {nearest}"


def _heads(config: Config) -> str | None:
    axis, key = heads_axis(config), "base_num_query_heads"
    rule = [name for name in make_rules(config.logical_axis_rules)["activation_heads"] if name not in AXES]
    (shards, over), heads = _product(config, *rule), config[key]
    if not axis or heads % shards or heads // shards % (n := _size(config, axis)) == 0:
        return None  # `trainer.config.resolve` reports a head count that the mesh axes do not divide
    local = f"{heads} / ({over}) = {heads // shards} query heads" if over else f"{heads} query heads"
    nearest = around(n, divisors(heads // shards))
    return f"{axis} {n} does not divide {local}, of which each device takes a share; nearest: {axis} {nearest}"


def _rules(config: Config) -> str | None:
    rules, sizes = make_rules(config.logical_axis_rules), mesh_axes(config)

    def split(name: str) -> tuple[str, ...]:
        return tuple(axis for axis in rules[name] if sizes[axis] > 1)

    problems, ours = [], tuple(axis for axis in AXES if sizes[axis] > 1)
    for name in LENGTHS:
        whole = split(name) if name in IN_ATTENTION else split(name)[: len(ours)]
        # usp runs Ulysses over the rule's last axis, even if this axis has size 1. So the rule must be exactly AXES.
        if whole != ours or (
            config.context_parallel_strategy == "usp" and name in IN_ATTENTION and rules[name] != AXES
        ):
            must = "be" if name in IN_ATTENTION else "begin with"
            problems.append(f"the rule of {name} must {must} [{','.join(AXES)}]")
    # Attention is computed per device: each device must have the key-value heads that its query heads use.
    if split("activation_heads") != split("activation_kv_heads"):
        problems.append("the rules of activation_heads and activation_kv_heads must be the same")
    return f"{'; '.join(problems)} where rows are split over devices; leave it out" if problems else None


ROWS = (Row(KEYS, Resume.LAYOUT),)
# Checks that apply if rows are split over devices.
_OF_PARTS: tuple[Check, ...] = (
    (("max_target_length",), _length),
    (("base_num_query_heads", "context_parallel_strategy"), _heads),
    refused(
        ("context_parallel_strategy", ICI[ULYSSES], DCN[ULYSSES]),
        lambda c: _size(c, ULYSSES) != 1 and c.context_parallel_strategy != "usp",
        f"only the strategy usp uses the mesh axis {ULYSSES}; set context_parallel_strategy=usp, or use the axis "
        f"{CONTEXT}",
    ),
    (("logical_axis_rules",), _rules),
    refused(
        ("sparse_matmul", "capacity_factor"),
        drops,
        "which tokens are dropped depends on the whole row; set sparse_matmul=true",
    ),
    refused(
        ("decoder_block",),
        lambda c: (facts := facts_of(c)) is not None and facts.recurrent,
        "its blocks have a recurrent state, which passes from token to token; do not split rows over devices",
    ),
)
# Checks that apply if tokens are reordered.
_OF_ORDER: tuple[Check, ...] = (
    refused(
        ("decoder_block",),
        lambda c: facts_of(c) is None,
        f"a custom block may mix tokens in storage order, which is not their order in the text; {IN_ORDER}",
    ),
    refused(
        ("enable_dropout", "dropout_rate", "attention_dropout_rate"),
        has_dropout,
        f"dropout is drawn by a token's position in the row, which reordering changes; {IN_ORDER}",
    ),
    refused(
        ("bwd_stochastic_rounding",),
        rounds,
        f"rounding is drawn by a token's position in the row, which reordering changes; {IN_ORDER}",
    ),
    refused(
        ("mtp_eval_target_module",),
        lambda c: c.mtp_eval_target_module and c.eval_interval > 0,
        f"the acceptance rate compares a token with its predecessor, which reordering has moved; {IN_ORDER}",
    ),
)
CHECKS: tuple[Check, ...] = (*only_if(splits_rows, _OF_PARTS), *only_if(token_order, _OF_ORDER))


def _one_size(axis: str) -> Callable[[Config], bool]:
    return lambda config: config[ICI[axis]] == config[DCN[axis]] == 1


INERT = (
    Inert(KEYS, lambda c: all(c[key] == 1 for key in SIZES), f"the mesh axes {' and '.join(AXES)} have one device"),
    Inert(
        ("context_parallel_load_balance", "context_parallel_reorder_strategy"),
        lambda c: c.context_parallel_strategy == "ulysses",
        "context_parallel_strategy=ulysses gives each device whole rows",
    ),
    Inert(
        ("context_parallel_load_balance", "context_parallel_reorder_strategy"),
        _one_size(CONTEXT),
        f"it applies only to the mesh axis {CONTEXT}, which has one device",
    ),
    Inert(
        ("context_parallel_reorder_strategy",),
        lambda c: not c.context_parallel_load_balance,
        "context_parallel_load_balance=false",
    ),
)
INERT_HERE = (Inert(KEYS, lambda c: not splits_rows(c), "no row is split over devices here"),)
