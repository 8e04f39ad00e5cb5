"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def return_freed() -> None:
    """Have the C library give back what it keeps for later; where it cannot, nothing happens.

    Packing weights frees many arrays of a few megabytes, which glibc keeps between those that stay: half as much again
    as the weights themselves.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
