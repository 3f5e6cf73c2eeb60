"""Which ranges of integers the grammar enforces exactly."""

from __future__ import annotations


def is_enforced_range(low: int | None, high: int | None) -> bool:
    """Whether the grammar accepts no integer below `low` or above `high`, and nothing that is no integer.

    By xgrammar's `GenerateRangeRegex`, which writes a range as patterns of digits, and some of them wrong.
    """
    if low is None and high is None:
        return True
    if high is None:
        return low in (0, 1) or low >= 10  # type: ignore[operator]
    if low is None:
        return high == -1 or high == 0 or (high > 0 and _is_exact(1, high))
    is_exact = low >= 0 or _is_exact(max(1, -high), -low)
    return is_exact and (high <= 0 or _is_exact(max(1, low), high))


def _is_exact(low: int, high: int) -> bool:
    """As `GenerateNumberPatterns`, for numbers of each length."""
    shortest, longest = len(str(low)), len(str(high))
    for length in range(shortest, longest + 1):
        first, last = 10 ** (length - 1), 10**length - 1
        start, end = (low if length == shortest else first), (high if length == longest else last)
        if length == 1 or start == end:
            continue
        texts = str(start), str(end)
        common = next(i for i in range(length) if texts[0][i] != texts[1][i])
        if common and common >= length - 2:
            if common != length - 1 and (start % 10, end % 10) != (0, 9):
                return False
        elif shortest == longest and common and start != first and end != last:
            return False
    return True
