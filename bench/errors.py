"""Errors of benchmarks. A benchmark that fails reports no number."""


class BenchError(Exception):
    """Base class: a benchmark failed."""


class OptionInvalid(BenchError):
    """An option, or a combination of options, that no benchmark can have."""


class SystemFailed(BenchError):
    """A system under test did not start, refused a request or died."""


class WrongAnswer(BenchError):
    """An answer is not as requested, so its speed means nothing."""
