"""The tile sizes of splash attention: the keys sa_*, and the values that the kernel accepts."""

from typing import NamedTuple

from trainer.config.key_rows import Inert, Resume, Row
from trainer.config.keys import Config
from trainer.config.numbers import around, divisors

LANES = 128  # the lanes of a TPU register; tile sizes, and therefore row lengths, are multiples of this number
_CHOICES = (512, 256, LANES)


class Tiles(NamedTuple):
    """The fields of JAX's `splash_attention.BlockSizes`. Sizes are in tokens. `fitted` replaces sizes of 0.

    `block_q`, `block_kv`: the tiles of scores in the forward pass. `*_dkv`: the tiles in the kernel for the gradients
    of keys and values. `*_dq`: the tiles in the kernel for the gradient of queries. `*_compute`: how many keys of a
    tile one matrix product processes. `use_fused_bwd_kernel`: whether the dkv kernel also computes the gradient of
    queries. `*_layout`: the minor dimension of a tile, which lies along the lanes of a register: HEAD_DIM_MINOR or
    SEQ_MINOR.
    """

    block_q: int = 0
    block_kv: int = 0
    block_kv_compute: int = 0
    block_q_dkv: int = 0
    block_kv_dkv: int = 0
    block_kv_dkv_compute: int = 0
    block_q_dq: int = 0
    block_kv_dq: int = 0
    use_fused_bwd_kernel: bool = False
    q_layout: str = "HEAD_DIM_MINOR"
    k_layout: str = "HEAD_DIM_MINOR"
    v_layout: str = "HEAD_DIM_MINOR"

    def fitted(self, length: int) -> "Tiles":
        """Returns the tiles for rows of `length` tokens, a multiple of 128.

        A size larger than the length becomes the length. A size of 0 becomes the largest of 512, 256 and 128 that
        divides the length or, for `*_compute`, the size of the tile.
        """
        sizes = {name: min(getattr(self, name) or _largest(length), length) for name in _WHOLE}
        sizes |= {name: min(getattr(self, name), length) or _largest(sizes[whole]) for name, whole in _PARTS.items()}
        return Tiles(**{**self._asdict(), **sizes})


AUTOMATIC = Tiles()
_PARTS = {"block_kv_compute": "block_kv", "block_kv_dkv_compute": "block_kv_dkv"}
_WHOLE = tuple(name for name in Tiles._fields if name.startswith("block_") and name not in _PARTS)
# The configuration key of each field, in the order of the fields.
_NAMES = (
    *("sa_block_q", "sa_block_kv", "sa_block_kv_compute", "sa_block_q_dkv", "sa_block_kv_dkv"),
    *("sa_block_kv_dkv_compute", "sa_block_q_dq", "sa_block_kv_dq", "sa_use_fused_bwd_kernel"),
    *("sa_q_layout", "sa_k_layout", "sa_v_layout"),
)
KEYS = dict(zip(Tiles._fields, _NAMES, strict=True))
# The fields that the fused kernel does not use.
OF_DQ = ("block_q_dq", "block_kv_dq")


def tiles_of(config: Config) -> Tiles:
    """Returns the tiles of a configuration."""
    return Tiles(**{name: config[key] for name, key in KEYS.items()})


def wrong_tiles(values: Config, shares: int) -> list[str]:
    """Returns one line for each size that the kernel rejects if a row's queries are split into `shares` equal parts."""
    length = values.max_target_length // shares
    given = tiles_of(values)
    fitted = given.fitted(length)
    unused = OF_DQ if given.use_fused_bwd_kernel else ()
    lines = []
    for name in (*_WHOLE, *_PARTS):
        size, whole = getattr(fitted, name), length
        what = f"max_target_length={values.max_target_length}"
        if shares > 1:
            what = f"{what} / {shares} devices = {length}"
        if name in _PARTS:
            whole = getattr(fitted, _PARTS[name])
            what = f"{KEYS[_PARTS[name]]}={whole}"
        if name in unused or whole % LANES or (size % LANES == 0 and whole % size == 0):
            continue
        lines.append(
            f"{KEYS[name]}={getattr(given, name)}: splash attention needs a multiple of {LANES} that divides {what}; "
            f"nearest: {around(size, (LANES * part for part in divisors(whole // LANES)))}"
        )
    return lines


def _largest(whole: int) -> int:
    return next((size for size in _CHOICES if whole % size == 0), whole)


ROWS = (Row(tuple(KEYS.values()), Resume.LAYOUT),)
INERT_HERE = (
    Inert(tuple(KEYS.values()), lambda c: c.attention != "splash", "the attention op is not splash here"),
    Inert(
        tuple(KEYS[name] for name in OF_DQ),
        lambda c: c.attention == "splash" and c.sa_use_fused_bwd_kernel,
        "with sa_use_fused_bwd_kernel=true the dkv kernel computes the gradient of queries",
    ),
)
