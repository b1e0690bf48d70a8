"""Words for messages."""


def counted(number: int, one: str, many: str = "") -> str:
    """Returns `number` with its noun: "1 step", "2,000 steps". `many` is the plural, if it is not `one` and an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
