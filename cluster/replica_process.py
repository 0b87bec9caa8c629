"""One replica's server: `specdec serve` as a process of its own, watched and ended by whoever started it.

A process and not a part of Ray's: what serves tokens shares no interpreter with what administers it, and a replica is
the same program as a server that stands alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.autoscale import ReplicaLoad
from cluster.replica_settings import filled
from cluster.state_folder import bound_log, private_folder, write_private
from specdec.errors import ModelError

_PR_SET_PDEATHSIG = 1
_PROBE_S = 2.0
_LOG_TAIL = 2000  # bytes of a dead server's log that its error quotes
_KILL_AFTER_S = 5.0  # beyond the drain that was asked for


class ReplicaProcess:
    """A server on ports of its own. ``settings``: as `specdec serve --config` reads them; host and ports are set here,
    and its id where they leave room for it. ``folder``: of the fleet, for its configuration and its log. ``key``: of
    ``server.keys_file``, where there is one.

    Raises:
        ConfigError: others may write in the folder.
        ModelError: ``python`` can not be run.
    """

    def __init__(
        self,
        replica_id: str,
        settings: dict[str, Any],
        *,
        host: str,
        folder: Path,
        python: Path | None,
        drain_s: float,
        key: str = "",
    ) -> None:
        self.host, self.http_port, self.grpc_port = host, *free_ports(host, 2)
        self._drain_s = drain_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        own = private_folder(folder)
        for part in ("replicas", replica_id):
            own = private_folder(own / part)
        config, self._log = own / "specdec.yaml", own / "specdec.log"
        write_private(config, yaml.safe_dump(self._with_ports(filled(settings, replica_id))))
        program = str((python or Path(sys.executable)).expanduser())
        words = [program, "-m", "specdec.cli.main", "serve", "--config", str(config)]
        self.bound_log()
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent
                )
            except OSError as error:
                raise ModelError(f"python: {program} can not be run ({error.strerror})") from None
        self._client = httpx.AsyncClient(base_url=f"http://{host}:{self.http_port}", timeout=_PROBE_S, trust_env=False)

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, ready or not."""
        return self._process.poll() is None

    async def is_ready(self) -> bool:
        """Whether it would take a request now."""
        try:
            return (await self._client.get("/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def told(self) -> tuple[str, ReplicaLoad]:
        """Its numeric fingerprint, and its load.

        Raises:
            ModelError: it does not say: it is dead, or refuses the key.
        """
        try:
            answer = await self._client.get("/v1/loads", headers=self._headers)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            hint = "; its keys_file needs the key in the model's key_file" if status in (401, 403) else ""
            raise ModelError(f"the server answers {status} to /v1/loads{hint}") from None
        except httpx.HTTPError as error:
            raise ModelError(f"the server does not answer: {error!r}") from None
        body = answer.json()
        load = body["loads"][0]
        told = ReplicaLoad(load["num_waiting_reqs"], load["forecast_wait_s"], load["utilization"])
        return body["numeric_fingerprint"], told

    def bound_log(self) -> None:
        """Keep what it says from growing for ever; to be called now and then."""
        bound_log(self._log)

    def explained(self) -> str:
        """Why it ended: its exit status, and the end of what it said."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
            said = log.read().decode("utf-8", "replace").strip()
        return f"the server ended with status {self._process.poll()}; {self._log} ends with: {said}"

    def begin_stop(self) -> None:
        """It takes no new call, and ends once those that it has are done or its drain is over."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)

    async def stopped(self, sleep: Callable[[float], Any]) -> None:
        """Wait for its end after `begin_stop`; one that does not end is killed. Has no effect the second time."""
        late_s = time.monotonic() + self._drain_s + _KILL_AFTER_S
        while self.alive:
            if time.monotonic() > late_s:
                self._process.kill()
            await sleep(0.05)
        await self._client.aclose()

    def _with_ports(self, settings: dict[str, Any]) -> dict[str, Any]:
        server = {
            **settings.get("server", {}),
            "host": self.host, "http_port": self.http_port, "grpc_port": self.grpc_port, "drain_s": self._drain_s,
        }  # fmt: skip
        return {**settings, "server": server}


def free_ports(host: str, count: int) -> list[int]:
    """So many ports that nobody listens on; who takes them soon gets them, since the system goes through all others
    before it gives one out again."""
    held = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for each in held:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def _end_with_parent() -> None:
    """In the child: no server outlives the one that watches over it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
