"""What can go wrong with a benchmark. None of it may end in a number."""


class BenchError(Exception):
    """Any failure of a benchmark."""


class SystemFailed(BenchError):
    """A system that should be measured did not start, refused a request or died."""


class WrongAnswer(BenchError):
    """An answer is not what was asked for, so its speed means nothing."""
