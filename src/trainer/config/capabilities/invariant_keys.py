"""The key `batch_invariant` and its checks. The key makes the results for a sequence bitwise independent of the batch
that contains the sequence."""

from collections.abc import Mapping
from platform import machine

from trainer.config.capabilities.expert_keys import drops
from trainer.config.derived import DCN, ICI, has_dropout
from trainer.config.family import facts_of
from trainer.config.key_rows import Check, left_out, only_if, refused
from trainer.config.keys import Config

OP = "invariant"
OF_BITS = ("dtype", "scan_layers")  # keys that must have the same value in generation and training
QUERIES = 64  # the row count of each matrix product, and the query count of each attention block, are multiples of it
# The minimum number of columns of a matrix product. With fewer columns, a product with 64 rows is summed in another
# order than a product with more rows.
COLUMNS = 16
TILE = 128  # attention sums over keys in tiles of this many tokens, which begin at the same positions in all programs

_WHOLE = ("diloco", "data", "fsdp")  # sharding over these mesh axes splits neither a sequence nor a matrix of a product


def _why_not(axis: str) -> str:
    """Returns why the mesh axis `axis` must have one device."""
    parts = "each device must have whole rows and whole matrices"
    return f"{'bitwise equality is not verified for pipelines' if axis == 'stage' else parts}; use data and fsdp"


def _one_device(key: str, why: str) -> Check:
    return refused((key,), lambda c: c[key] not in (1, -1), why)


_ALL = (
    refused(("max_target_length",), lambda c: c.max_target_length % TILE, f"rows must be a multiple of {TILE} tokens"),
    refused(
        ("attention",),
        lambda c: c.attention not in ("autoselected", OP),
        f"only the attention op {OP} is batch-invariant; leave attention out",
    ),
    refused(
        ("enable_dropout", "dropout_rate", "attention_dropout_rate"),
        has_dropout,
        "training would drop values that generation does not; set enable_dropout=false",
    ),
    refused(
        ("sparse_matmul", "capacity_factor"),
        drops,
        "which tokens are dropped depends on the batch; set sparse_matmul=true",
    ),
    refused(("decoder_block",), lambda c: facts_of(c) is None, "bitwise equality is not verified for custom blocks"),
    refused(
        ("decoder_block",),
        lambda c: (facts := facts_of(c)) is not None and facts.recurrent,
        "a recurrent state sums tokens in chunks that begin where a call begins, not at fixed positions",
    ),
    refused(
        ("prefill_chunk_size",),
        lambda c: c.prefill_chunk_size % QUERIES,
        f"chunks must be a multiple of {QUERIES} tokens",
    ),
    left_out("quantization", "bitwise equality is not verified for quantized products"),
    left_out("quantize_kvcache", "training has no 8-bit cache"),
    left_out("weight_sparsity_m", "bitwise equality is not verified for masked products"),
    left_out("lora_weight_qtype", "bitwise equality is not verified for quantized products"),
    *(_one_device(keys[axis], _why_not(axis)) for keys in (ICI, DCN) for axis in keys if axis not in _WHOLE),
)


CHECKS = only_if(lambda c: c.batch_invariant, _ALL, shown=("batch_invariant",))


def split_on(values: Config, mesh: Mapping[str, int]) -> list[str]:
    """Returns one line for each axis of a resolved `mesh` that must have one device but has more."""
    wrong = [axis for axis, size in mesh.items() if size > 1 and axis not in _WHOLE] if values.batch_invariant else ()
    return [f"batch_invariant=true: {axis} has {mesh[axis]} devices: {_why_not(axis)}" for axis in wrong]


def compiler_options(config: Config, platform: str) -> dict[str, str]:
    """Returns the XLA options with which training and generation are compiled; {} except for batch_invariant=true on
    CPUs.

    By default, XLA's CPU backend passes large sums, together with the operations around them, to a library that sums in
    a different order. With the returned option, XLA uses this library only for matrix products.
    """
    if not config.batch_invariant or platform != "cpu":
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def unchecked(config: Config, platform: str) -> str:
    """Returns a note if bitwise equality has not been verified on `platform`; otherwise ""."""
    if not config.batch_invariant or (platform == "cpu" and _is_x86()):
        return ""
    where = f"{platform} of {machine()}" if platform == "cpu" else platform
    return f"batch_invariant=true: log-probabilities of generation and training have not been compared on {where}"


def _is_x86() -> bool:
    return machine().lower() in ("x86_64", "amd64")
