"""The key for results that do not depend on the batch, bit for bit (`batch_invariant`), and its checks."""

from collections.abc import Mapping
from platform import machine

from trainer.config.capabilities.expert_keys import drops
from trainer.config.derived import DCN, ICI, has_dropout
from trainer.config.family import facts_of
from trainer.config.key_rows import Check, left_out, only_if, refused
from trainer.config.keys import Config

OP = "invariant"
OF_BITS = ("dtype", "scan_layers")  # the values that generation must share with training
QUERIES = 64  # the rows of a matrix product, and the queries of an attention block, are a multiple of this number
COLUMNS = 16  # the minimum columns of a product: with fewer, 64 rows are multiplied in a different way than more rows
TILE = 128  # attention sums keys in tiles of this many tokens, at the same positions of a sequence in all programs

_WHOLE = ("diloco", "data", "fsdp")  # mesh axes that do not split rows, and whose devices gather whole matrices


def _why_not(axis: str) -> str:
    """Returns why a mesh axis must have one device."""
    parts = "each device must have whole rows and whole matrices"
    return f"{'bits of a pipeline are not proved' if axis == 'stage' else parts}; use data and fsdp"


def _one_device(key: str, why: str) -> Check:
    return refused((key,), lambda c: c[key] not in (1, -1), why)


_ALL = (
    refused(("max_target_length",), lambda c: c.max_target_length % TILE, f"rows must be a multiple of {TILE} tokens"),
    refused(
        ("attention",),
        lambda c: c.attention not in ("autoselected", OP),
        f"it has an attention op of its own, {OP}",
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
    refused(("decoder_block",), lambda c: facts_of(c) is None, "the bits of your own blocks are not known"),
    refused(
        ("decoder_block",),
        lambda c: (facts := facts_of(c)) is not None and facts.recurrent,
        "a recurrent state sums tokens in chunks that begin with each call, not at fixed positions",
    ),
    refused(
        ("prefill_chunk_size",),
        lambda c: c.prefill_chunk_size % QUERIES,
        f"chunks must be a multiple of {QUERIES} tokens",
    ),
    left_out("quantization", "bits of quantized products are not proved"),
    left_out("quantize_kvcache", "training has no cache in 8 bits"),
    left_out("weight_sparsity_m", "bits of masked products are not proved"),
    left_out("lora_weight_qtype", "bits of quantized products are not proved"),
    *(_one_device(keys[axis], _why_not(axis)) for keys in (ICI, DCN) for axis in keys if axis not in _WHOLE),
)


CHECKS = only_if(lambda c: c.batch_invariant, _ALL, shown=("batch_invariant",))


def split_on(values: Config, mesh: Mapping[str, int]) -> list[str]:
    """Returns one line for each axis of a resolved `mesh` that must have one device but has more."""
    wrong = [axis for axis, size in mesh.items() if size > 1 and axis not in _WHOLE] if values.batch_invariant else ()
    return [f"batch_invariant=true: {axis} has {mesh[axis]} devices: {_why_not(axis)}" for axis in wrong]


def compiler_options(config: Config, platform: str) -> dict[str, str]:
    """Returns the options with which XLA compiles training and generation for `platform`; {} without the key.

    XLA's CPU backend passes sums of enough elements, and the operations around the sums, to a library that sums in
    another order. With the option, the library computes only products.
    """
    if not config.batch_invariant or platform != "cpu":
        return {}
    return {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def unchecked(config: Config, platform: str) -> str:
    """Returns a note if bits have not been compared on the platform; otherwise ""."""
    if not config.batch_invariant or (platform == "cpu" and _is_x86()):
        return ""
    where = f"{platform} of {machine()}" if platform == "cpu" else platform
    return f"batch_invariant=true: log-probabilities of generation and training have not been compared on {where}"


def _is_x86() -> bool:
    return machine().lower() in ("x86_64", "amd64")
