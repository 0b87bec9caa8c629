"""A limit on work that does not count time in which this process is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from bench.soak.soak_fault import SoakFault

LOOK_S = 1.0
Result = TypeVar("Result")


async def within(work: Coroutine[Any, Any, Result], limit_s: float, what: str) -> Result:
    """The result of ``work``, looked at once a second; where the process is stopped meanwhile, that is one look.

    Raises:
        SoakFault: ``what`` did not end in ``limit_s`` seconds; the work is cancelled.
    """
    task = asyncio.ensure_future(work)
    left_s = limit_s
    try:
        while not task.done():
            if left_s <= 0:
                raise SoakFault(f"{what} did not end within {limit_s:g} s")
            await asyncio.wait([task], timeout=min(LOOK_S, left_s))
            left_s -= LOOK_S
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=LOOK_S)
