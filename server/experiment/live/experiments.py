"""The experiments of a server: start, stop, status, resumption."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from server.admission import Admission
from server.engine_client import EngineClient
from server.errors import RECORDS_FILE, DrainingError, FileErrors
from server.experiment.config import NAME, parse_config, refuse
from server.experiment.folder import ExperimentFolder, Manifest, State, StoredState, difference, now_text
from server.experiment.live.conclusions import Conclusion, Conclusions, NoResultError
from server.experiment.live.plan import LivePlan, make_plan
from server.experiment.live.traffic import LiveTraffic, RunningExperiment, limit_reached
from server.experiment.records import ExperimentError, PlanError, RunClock
from specdec.config import ExperimentsConfig, read_text
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError, FieldViolation, InvalidRequestError, RequestError

_LOG = logging.getLogger(__name__)

_BY_A_CALL = "it was stopped by a call"


class ExperimentsOffError(RequestError):
    reason = "EXPERIMENTS_OFF"
    http_status, grpc_code = 501, "UNIMPLEMENTED"
    message = "experiments need a folder for their records; set server.experiments.folder"


class ExperimentNotFoundError(RequestError):
    reason = "EXPERIMENT_NOT_FOUND"
    http_status, grpc_code = 404, "NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no experiment {name[:64]!r}; `specdec ab status` lists all")


class ExperimentNotStartedError(RequestError):
    """Another experiment, or the state of the folder, prevents the start."""

    reason = "EXPERIMENT_NOT_STARTED"
    http_status, grpc_code = 409, "FAILED_PRECONDITION"


@dataclass(frozen=True)
class ExperimentStatus:
    name: str
    state: State
    mode: str
    started: str  # ISO 8601, of the first run
    records: Mapping[str, int]  # by arm, the control first
    reason: str = ""  # why it has ended
    left_out: Mapping[str, int] = field(default_factory=dict)  # requests of this run that do not participate, by reason
    warnings: tuple[str, ...] = ()


def live_facts(info: EngineInfo) -> dict[str, str]:
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


class Experiments:
    """Belongs to one event loop. While no experiment runs, `Admission.experiments` is None, which costs nothing.

    Raises:
        ConfigError: a file of `start` is not a plan; names the fault and its line.
    """

    def __init__(
        self, config: ExperimentsConfig, client: EngineClient, admission: Admission, file_errors: FileErrors
    ) -> None:
        self._config, self._client, self._admission = config, client, admission
        self._file_errors = file_errors
        self._running: dict[str, RunningExperiment] = {}
        self._unsaved: dict[str, StoredState] = {}  # of experiments that have ended, until they are written
        self._not_resumed: dict[str, StoredState] = {}  # shown instead of `running`, which stays for the next server
        self._clock = RunClock()
        self._conclusions = Conclusions()
        self._changing, self._closed = asyncio.Lock(), False
        self._endings: set[asyncio.Task[None]] = set()
        try:
            texts = [(str(path), read_text(path, f"{path}:")) for path in config.start]
            self._files = [(parse_config(text, source).name, text, source) for source, text in texts]
        except (ConfigError, ExperimentError) as error:
            raise ConfigError(f"server.experiments.start: {error}") from None

    async def start_configured(self) -> None:
        """Resume the experiments that ran when the server ended, then start the configured files; failures are logged.
        An experiment that has ended is not started again."""
        place = self._config.folder
        if place is None:
            return
        for folder in await asyncio.to_thread(self._folders):
            name = folder.path.name
            try:
                async with self._changing:  # a call may start or stop it
                    if name not in self._running and (await self._state(folder)).state == "running":
                        await self._start(await asyncio.to_thread(folder.plan_text), f"{name} (resumed)")
            except (ExperimentError, RequestError) as error:
                _LOG.error("experiment %s is not resumed: %s", name, error)
                with suppress(ExperimentError):  # `get` reports a folder that cannot be read
                    reason = f"it could not be resumed: {error}"
                    self._not_resumed[name] = await asyncio.to_thread(_stopped, folder, reason)
        for name, text, source in self._files:
            try:
                async with self._changing:
                    await self._start_file(ExperimentFolder(place / name), text, source)
            except (ExperimentError, RequestError) as error:
                _LOG.error("%s: not started: %s", source, error)

    async def _start_file(self, folder: ExperimentFolder, text: str, source: str) -> None:
        """Start a configured file, unless its experiment runs or has ended."""
        name = folder.path.name
        if name in self._running:
            if text != await asyncio.to_thread(folder.plan_text):
                _LOG.warning("experiment %s keeps its original plan; %s has changed", name, source)
            return
        ended = await self._state(folder)
        if folder.exists and ended.state != "running" and ended.at:  # a start that was killed or failed noted no state
            _LOG.info("experiment %s has %s and is not started again: %s", name, ended.state, ended.reason)
            return
        await self._start(text, source)

    async def start(self, text: str, source: str = "plan") -> ExperimentStatus:
        """Start the experiment that ``text`` describes, or resume it. A caller that is cancelled does not interrupt it.

        Raises:
            ExperimentsOffError: no folder for records is configured.
            InvalidRequestError: the text is not a plan for this server; names each fault and its line.
            ExperimentNotStartedError: another experiment has the name or changes the same setting, this one has
                finished, or its folder cannot be used.
            EngineDeadError: the engine is not ready.
            DrainingError: the server ends.
        """
        if self._config.folder is None:
            raise ExperimentsOffError
        return await asyncio.shield(self._start_alone(text, source))

    async def _start_alone(self, text: str, source: str) -> ExperimentStatus:
        async with self._changing:
            return await self._start(text, source)

    async def _start(self, text: str, source: str) -> ExperimentStatus:
        """As `start`; the caller holds the lock."""
        if self._closed:
            raise DrainingError
        try:
            config = parse_config(text, source)
            plan, problems = make_plan(config, self._client.info)
            refuse(text, source, problems)
        except PlanError as error:
            raise InvalidRequestError([FieldViolation("plan", problem) for problem in error.problems]) from None
        self._check_free(plan)
        try:
            return await self._begin(plan, text)
        except (ExperimentError, OSError) as error:
            self._file_errors[RECORDS_FILE] += 1
            raise ExperimentNotStartedError(str(error)) from None

    async def stop(self, name: str) -> ExperimentStatus:
        """Stop an experiment that runs, or that could not be resumed. Its records stay, and it can be started again. A
        caller that is cancelled does not interrupt the end. Returns the status, also of an experiment that has ended
        before; `running` if it was started again behind this call.

        Raises:
            ExperimentNotFoundError: no experiment has this name.
            NoResultError: its folder cannot be read.
        """
        if name not in self._running:
            await asyncio.shield(self._stop_unresumed(name))
        if name in self._running:  # also if it was starting
            await asyncio.wait([self._begin_end(name, "stopped", _BY_A_CALL)])
        return await self.get(name)

    async def _stop_unresumed(self, name: str) -> None:
        """End an experiment that is `running` on disk only."""
        folder = self._folder(name)
        async with self._changing:
            if name in self._running:
                return
            try:
                if (await self._state(folder)).state == "running":
                    self._unsaved[name] = await asyncio.to_thread(_stopped, folder, _BY_A_CALL)
            except ExperimentError as error:
                raise NoResultError(str(error)) from None
            await self._save(name)

    async def statuses(self) -> list[ExperimentStatus]:
        """Of all; one whose folder cannot be read is `failed`, of mode "unknown"."""
        found = []
        for folder in await asyncio.to_thread(self._folders):
            name = folder.path.name
            try:
                found.append(await self.get(name))
            except ExperimentNotFoundError:  # it was removed just now
                continue
            except NoResultError as error:
                found.append(ExperimentStatus(name, "failed", "unknown", "", {}, str(error)))
        return found

    async def get(self, name: str) -> ExperimentStatus:
        """The status of one experiment.

        Raises:
            ExperimentNotFoundError: no experiment has this name.
            NoResultError: its folder cannot be read.
        """
        folder = self._folder(name)
        unsaved = self._unsaved.get(name)
        try:
            manifest, state = await asyncio.to_thread(lambda: (folder.manifest(), unsaved or folder.state()))
            running = self._running.get(name)
            if running is None and state.state == "running":  # by an earlier server, while this one loads its engine
                state = self._not_resumed.get(name) or state.model_copy(
                    update={"records": await asyncio.to_thread(folder.written)}
                )
        except ExperimentError as error:
            raise NoResultError(str(error)) from None
        mode = manifest.config.assignment.mode
        if running is None:
            return ExperimentStatus(name, state.state, mode, manifest.started, state.records, state.reason)
        return ExperimentStatus(
            name, "running", mode, manifest.started, running.records, "", dict(running.left_out), running.plan.warnings
        )

    async def conclude(self, name: str) -> Conclusion:
        """The analysis of its records so far.

        Raises:
            ExperimentNotFoundError: no experiment has this name.
            NoResultError: the records are too few.
        """
        status = await self.get(name)
        empty = [arm for arm, count in status.records.items() if not count]
        if empty or not status.records:
            raise NoResultError(f"arm {empty[0]!r} has no record yet" if empty else "there are no records")
        return await self._conclusions.get(self._folder(name).path, status.state)

    async def close(self) -> None:
        """The server ends: flush the records and write the states of experiments that have ended. The next server
        resumes the others."""
        self._closed = True
        endings = list(self._endings)
        for task in endings:
            task.cancel()
        await asyncio.gather(*endings, return_exceptions=True)
        async with self._changing:  # after a start that is under way
            self._admission.experiments = None
            for running in self._running.values():
                running.abandon()
                await asyncio.to_thread(running.flush)
            self._running.clear()
            for name in list(self._unsaved):
                await self._save(name)

    def _check_free(self, plan: LivePlan) -> None:
        """Raise ExperimentNotStartedError if a running experiment has the name or changes the same setting."""
        name = plan.config.name
        if name in self._running:
            raise ExperimentNotStartedError(f"experiment {name} is already running; stop it first")
        for other, running in self._running.items():
            shared = sorted(plan.changes & running.plan.changes)
            if shared:
                raise ExperimentNotStartedError(
                    f"experiments {name} and {other} both change {', '.join(shared)}; stop {other} first"
                )

    async def _begin(self, plan: LivePlan, text: str) -> ExperimentStatus:
        name = plan.config.name
        assert self._config.folder is not None  # checked in `start`
        folder = ExperimentFolder(self._config.folder / name)
        await self._save(name)
        if name in self._unsaved:
            raise ExperimentNotStartedError(f"experiment {name} has ended, but {folder.path} cannot be written")
        earlier = await asyncio.to_thread(_earlier, folder, plan, text) if folder.exists else None
        plan, written, ran_s = earlier or (plan, {}, 0.0)
        if earlier is None:
            manifest = Manifest(config=plan.config, started=now_text(), facts=live_facts(self._client.info))
            await asyncio.to_thread(folder.begin, text, manifest)
        if over := limit_reached(plan.config.stopping, written, ran_s):  # the server ended before the state was written
            _LOG.info("experiment %s is over: %s", name, over)
            state = StoredState(state="finished", at=now_text(), reason=over, records=written, ran_s=ran_s)
            await asyncio.to_thread(folder.note, state)
            return await self.get(name)
        on_over = partial(self._begin_end, name)
        running = RunningExperiment(
            plan, folder.path, self._client, self._clock, written, ran_s, on_over, self._file_errors
        )
        try:
            state = StoredState(state="running", at=now_text(), records=written, ran_s=ran_s)
            await asyncio.to_thread(folder.note, state)
        except BaseException:  # close its record file
            running.abandon()
            await asyncio.to_thread(running.flush)
            raise
        self._running[name] = running
        self._not_resumed.pop(name, None)
        self._changed()
        running.start()
        for warning in plan.warnings:
            _LOG.warning("experiment %s: %s", name, warning)
        _LOG.info("experiment %s runs, with %d earlier records", name, sum(written.values()))
        return await self.get(name)

    def _begin_end(self, name: str, state: State, reason: str) -> asyncio.Task[None]:
        """End the experiment in a task of its own, which only `close` cancels. Keeps the state for `close`, which
        writes it if it cancels the task."""
        running = self._running.get(name)
        if running is not None:
            ended = StoredState(state=state, at=now_text(), reason=reason, records=running.records, ran_s=running.ran_s)
            self._unsaved.setdefault(name, ended)
        task = asyncio.create_task(self._end(name), name="experiment-end")
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def _end(self, name: str) -> None:
        async with self._changing:
            ended = self._unsaved.get(name)
            running = None if ended is None or self._closed else self._running.pop(name, None)
            if ended is None or running is None:  # another call has ended it, or `close`; a new run, if any, goes on
                return
            self._changed()
            try:
                trouble = await running.stop()
            except asyncio.CancelledError:  # by `close`
                running.abandon()
                raise
            finally:
                await asyncio.to_thread(running.flush)
            reason = "; ".join(filter(None, (ended.reason, trouble)))
            level = logging.ERROR if trouble or ended.state == "failed" else logging.INFO
            _LOG.log(level, "experiment %s: %s", name, reason)
            final = {"at": now_text(), "reason": reason, "records": running.records}
            self._unsaved[name] = ended.model_copy(update=final)
            await self._save(name)

    async def _state(self, folder: ExperimentFolder) -> StoredState:
        """The state of an experiment that does not run here, from the disk unless it has yet to be written."""
        unsaved = self._unsaved.get(folder.path.name)
        return await asyncio.to_thread(folder.state) if unsaved is None else unsaved

    async def _save(self, name: str) -> None:
        """Write the state of an experiment that has ended, if it is not written yet. A failure is logged; the next
        start or stop of the experiment, or the server's end, tries again."""
        state = self._unsaved.get(name)
        if state is None:
            return
        try:
            await asyncio.to_thread(self._folder(name).note, state)
        except ExperimentError as error:
            self._file_errors[RECORDS_FILE] += 1
            _LOG.error("experiment %s: %s", name, error)
        else:
            self._unsaved.pop(name, None)

    def _changed(self) -> None:
        running = list(self._running.values())
        self._admission.experiments = LiveTraffic(running) if running else None

    def _folder(self, name: str) -> ExperimentFolder:
        if self._config.folder is None:
            raise ExperimentsOffError
        folder = ExperimentFolder(self._config.folder / name)
        if not NAME.fullmatch(name) or not folder.exists:
            raise ExperimentNotFoundError(name)
        return folder

    def _folders(self) -> list[ExperimentFolder]:
        place: Path | None = self._config.folder
        if place is None or not place.is_dir():
            return []
        found = [ExperimentFolder(path) for path in sorted(place.iterdir()) if NAME.fullmatch(path.name)]
        return [folder for folder in found if folder.exists]


def _stopped(folder: ExperimentFolder, reason: str) -> StoredState:
    """The state, from now on, of an experiment that is `running` on disk only."""
    ran_s = folder.state().spent_s
    return StoredState(state="stopped", at=now_text(), reason=reason, records=folder.written(), ran_s=ran_s)


def _earlier(folder: ExperimentFolder, plan: LivePlan, text: str) -> tuple[LivePlan, dict[str, int], float] | None:
    """Of earlier runs of the same experiment: ``plan`` with the defaults of the version that began it, records by arm,
    and seconds that it ran. None: it has ended without a record, for example because its draft model cannot be loaded;
    its name can then be used again. text: of the plan.

    Raises:
        ExperimentNotStartedError: the folder belongs to another plan, or the experiment has finished.
    """
    name, state, written = plan.config.name, folder.state(), folder.written()
    if state.state != "running" and not written:
        return None
    begun = folder.manifest().config
    found = difference(begun.model_dump(mode="json"), plan.config.model_dump(mode="json"), "plan")
    if found and text != folder.plan_text():
        raise ExperimentNotStartedError(
            f"there are records of an experiment {name} with another plan ({found}); choose another name"
        )
    if state.state == "finished":
        raise ExperimentNotStartedError(f"experiment {name} has ended: {state.reason}; choose another name")
    return replace(plan, config=begun), written, state.spent_s
