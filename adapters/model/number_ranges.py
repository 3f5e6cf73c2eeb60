"""Sets of numbers as ranges: of 128 experts, only the first and the last number are written down."""

from collections.abc import Iterator, Sequence

Ranges = tuple[tuple[int, int], ...]  # (first, last), ascending, as few as possible


def ranges_of(numbers: Sequence[int]) -> Ranges:
    """Ascending numbers as ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def numbers_in(ranges: Ranges) -> Iterator[int]:
    """The numbers of ranges."""
    for first, last in ranges:
        yield from range(first, last + 1)


def count_of(ranges: Ranges) -> int:
    """The number of numbers in ranges."""
    return sum(last - first + 1 for first, last in ranges)
