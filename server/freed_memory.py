"""Memory that the C library keeps when it is freed."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give back to the system what loading used for a while: it is kept for allocations to come, of which a server that
    is ready has few. Where the C library has no such call, nothing."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
