"""Finds divisors and nearby numbers, which messages suggest."""

import math
from collections.abc import Iterable


def divisors(*numbers: int) -> list[int]:
    """Returns the common divisors of `numbers` in ascending order."""
    common = math.gcd(*numbers)
    small = [n for n in range(1, math.isqrt(common) + 1) if common % n == 0]
    return sorted({*small, *(common // n for n in small)})


def around(number: int, fitting: Iterable[int]) -> str:
    """Returns a text with those numbers in the sorted `fitting` that are next below and next above `number`: "2 or
    4"."""
    others = [*fitting]
    below, above = [n for n in others if n < number], [n for n in others if n > number]
    return " or ".join(map(str, below[-1:] + above[:1]))


def multiples_around(number: int, step: int) -> str:
    """Returns a text with the multiple of `step` at or below `number` (omitted if 0) and the next multiple."""
    below = number // step * step
    return " or ".join(str(n) for n in (below, below + step) if n)
