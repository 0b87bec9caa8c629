"""What an experiment's records say so far, worked out beside the server rather than in it."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from server.experiment.live.conclusion import Conclusion
from server.experiment.live.live_errors import NoResultError

_LOG = logging.getLogger(__name__)
NOTHING_YET = 3
"""Exit code of an analysis of too few records."""
_LIMIT_S = 120.0


class Conclusions:
    """Runs one analysis at a time, and remembers the last of each folder as long as nothing is added to it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known: dict[Path, tuple[int, Conclusion]] = {}

    async def get(self, folder: Path) -> Conclusion:
        """What the records in ``folder`` say.

        Raises:
            NoResultError: there is none yet, or it takes too long.
        """
        async with self._lock:
            size = await asyncio.to_thread(_size, folder)
            known = self._known.get(folder)
            if known is not None and known[0] == size:
                return known[1]
            found = await _run(folder)
            self._known[folder] = (size, found)
            return found


async def _run(folder: Path) -> Conclusion:
    module = "server.experiment.live.conclude_process"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, str(folder),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_LIMIT_S):
            out, error = await process.communicate()
    except TimeoutError:
        raise NoResultError(
            f"the analysis took more than {_LIMIT_S:g} s; run `specdec ab analyze` on the folder"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == NOTHING_YET:
        raise NoResultError(error.decode(errors="replace").strip())
    if process.returncode:
        _LOG.error("an analysis failed: %s", error.decode(errors="replace"))
        raise NoResultError("the analysis failed; the server's log tells more")
    return Conclusion.model_validate_json(out)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("records-*"))
