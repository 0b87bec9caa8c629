"""The folder of one experiment: plan, manifest, state, records, and what a process beside the server concludes."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from server.experiment.config import ExperimentConfig, Manifest, StrictModel
from server.experiment.records import RECORD_FILES, ExperimentError, read_records
from specdec.errors import RequestError
from specdec.types import EngineInfo


class ExperimentsOffError(RequestError):
    """This server keeps no experiments."""

    reason = "EXPERIMENTS_OFF"
    http_status, grpc_code = 501, "UNIMPLEMENTED"

    def __init__(self) -> None:
        super().__init__("experiments need a place for their records; set server.experiments.folder")


class ExperimentNotFoundError(RequestError):
    """There is no experiment of this name."""

    reason = "EXPERIMENT_NOT_FOUND"
    http_status, grpc_code = 404, "NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no experiment {name[:64]!r} here; list them to see which there are")


class ExperimentNotStartedError(RequestError):
    """Another experiment is in the way, or the state of its folder."""

    reason = "EXPERIMENT_NOT_STARTED"
    http_status, grpc_code = 409, "FAILED_PRECONDITION"


class NoResultError(RequestError):
    """The records say nothing yet, or can not be read."""

    reason = "EXPERIMENT_NO_RESULT"
    http_status, grpc_code = 409, "FAILED_PRECONDITION"


State = Literal["running", "stopped", "finished", "failed"]
_NAME = "state.json"


class StoredState(StrictModel):
    """`running` also when the server that ran it is gone: the next one goes on. ``at``: ISO 8601, since when.
    ``records``: by arm, as of then."""

    state: State
    at: str
    reason: str = ""
    records: dict[str, int] = Field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, whole or not at all. Raises OSError."""
        draft = folder / (_NAME + ".new")
        draft.write_text(self.model_dump_json() + "\n", encoding="utf-8")
        os.replace(draft, folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> StoredState | None:
        """None: the folder has none.

        Raises:
            ExperimentError: it can not be read.
        """
        path = folder / _NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ExperimentError(f"{path}: can not be read ({error}); move the folder away") from None


@dataclass(frozen=True)
class ExperimentStatus:
    """``started``: ISO 8601, its very first start. ``records`` by arm, the control first. ``left_out``: requests that
    took no part, by why, since the server runs it; ``given_up``: shadows that were not sent to their end. ``reason``:
    why it does not run any more."""

    name: str
    state: State
    mode: str
    started: str
    records: Mapping[str, int]
    reason: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    given_up: int = 0
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"records": dict(self.records), "left_out": dict(self.left_out)}


def live_facts(info: EngineInfo) -> dict[str, str]:
    """Facts by what they are called."""
    return {
        "server": f"specdec {info.version}",
        "model": info.target,
        "draft": info.draft or "none",
        "drafters": ", ".join(info.drafters) or "none",
        "numbers": f"{info.dtype}, {info.kernels} kernels, {info.numeric_mode}",
        "threads": str(info.threads),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "system": platform.system(),
    }


_PLAN = "plan.yaml"


@dataclass(frozen=True)
class ExperimentFolder:
    """Every method may wait for the disk, and raises ExperimentError where that does not do."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether an experiment was ever begun here."""
        return (self.path / "manifest.json").exists()

    def manifest(self) -> Manifest:
        """Its plan, and when it began."""
        return Manifest.read(self.path)

    def state(self) -> StoredState:
        """Its state; `stopped` where nothing is said, as of a folder that was copied here."""
        return StoredState.read(self.path) or StoredState(state="stopped", at="", reason="it never ran here")

    def plan_text(self) -> str:
        """The plan as it was sent."""
        try:
            return (self.path / _PLAN).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ExperimentError(f"{self.path / _PLAN}: can not be read ({error})") from None

    def begin(self, config: ExperimentConfig, text: str, facts: dict[str, str]) -> None:
        """Note what is begun now."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            draft = self.path / (_PLAN + ".new")
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, self.path / _PLAN)
            Manifest(config=config, started=now_text(), facts=facts).write(self.path)
        except (OSError, UnicodeEncodeError) as error:
            raise ExperimentError(f"{self.path}: can not be written ({error}); look at server.experiments") from None

    def note(self, state: StoredState) -> None:
        """Note its state."""
        try:
            state.write(self.path)
        except OSError as error:
            raise ExperimentError(f"{self.path}: can not be written ({error}); free some space") from None

    def written(self) -> dict[str, int]:
        """Records by arm, each request once."""
        if not RECORD_FILES.paths(self.path):
            return {}
        return dict(Counter(record.arm for record in read_records(self.path).records))


def now_text() -> str:
    """The time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Conclusion(BaseModel):
    """``result``: `Result` as JSON; ``report``: the same as a page."""

    result: str
    report: str


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
