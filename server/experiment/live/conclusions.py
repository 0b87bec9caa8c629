"""Analysis of an experiment's records so far, by a child process: ``python -m server.experiment.live.conclusions
FOLDER STATE``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from pydantic import BaseModel

from server.experiment.folder import ExperimentFolder, State
from server.experiment.records import ExperimentError, read_records
from specdec.child_python import module_command, module_environment
from specdec.errors import RequestError

_LOG = logging.getLogger(__name__)


class NoResultError(RequestError):
    reason = "EXPERIMENT_NO_RESULT"
    http_status, grpc_code = 409, "FAILED_PRECONDITION"


class Conclusion(BaseModel):
    result: str  # `Result` as JSON
    report: str  # HTML


_TOO_FEW = 3  # exit code of the child if the records are too few
_NICE = 10  # of the child: requests have priority
_LIMIT_S = 120.0


class Conclusions:
    """Runs one analysis at a time, and caches the last of each folder until its records grow or its state changes."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._known: dict[Path, tuple[tuple[int, State], Conclusion]] = {}

    async def get(self, folder: Path, state: State) -> Conclusion:
        """The analysis of the records in ``folder``, of an experiment in ``state``.

        Raises:
            NoResultError: there is none yet, or it takes too long.
        """
        async with self._lock:
            size = await asyncio.to_thread(lambda: sum(path.stat().st_size for path in folder.glob("records-*")))
            version = size, state
            known = self._known.get(folder)
            if known is not None and known[0] == version:
                return known[1]
            found = await _run(folder, state)
            self._known[folder] = (version, found)
            return found


async def _run(folder: Path, state: State) -> Conclusion:
    process = await asyncio.create_subprocess_exec(
        *module_command("server.experiment.live.conclusions"), str(folder), state, env=module_environment(),
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
    if process.returncode == _TOO_FEW:
        raise NoResultError(error.decode(errors="replace").strip())
    if process.returncode:
        _LOG.error("an analysis failed: %s", error.decode(errors="replace"))
        raise NoResultError("the analysis failed; see the server's log")
    return Conclusion.model_validate_json(out)


def main(folder: Path, state: str) -> int:
    """Print a `Conclusion` as JSON; returns the exit code. With `_TOO_FEW`, standard error gives the reason."""
    # Imported here: only the child process needs them.
    from server.experiment.analysis.analyse import analyse
    from server.experiment.report.render import render

    os.nice(_NICE)
    try:
        result = analyse(ExperimentFolder(folder).manifest(), read_records(folder), ended=state != "running")
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return _TOO_FEW
    sys.stdout.write(Conclusion(result=result.model_dump_json(), report=render(result)).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
