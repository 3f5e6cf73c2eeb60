"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Tests send Ctrl-C to what they start. A shell's `&` starts us with it ignored, which children would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
