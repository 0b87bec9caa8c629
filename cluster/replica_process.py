"""The server of one replica: `specdec serve` as a child process.

It is a separate process, not a part of Ray's, so a replica is the same program as a stand-alone server, and serving
shares no interpreter with administration.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import httpx
import yaml

from cluster.autoscale import ReplicaLoad
from cluster.config import authority, settings_of
from cluster.deployment import Deployment
from cluster.state_folder import bound_log, log_tail, private_folder, replace_files
from specdec.child_python import die_with_parent
from specdec.config import Config, merged
from specdec.control_groups import usable_cores
from specdec.errors import ModelError

_REQUEST_S = 2.0  # timeout of /readyz and /v1/loads
_KILL_AFTER_S = 5.0  # after the drain time


class SilentServerError(ModelError):
    """A server does not answer a request in time."""


class RefusedKeyError(ModelError):
    """A server refuses the fleet's key."""


class ReplicaProcess:
    """A server on its own ports.

    Host, ports, threads and the replica's id are filled into the settings of ``deployment``. Without reserved cores its
    settings alone choose its threads. ``host``: its address.

    Raises:
        ConfigError: others may write to the folder.
        ModelError: a file cannot be written, or the deployment's interpreter cannot be run.
    """

    def __init__(self, replica_id: str, deployment: Deployment, host: str) -> None:
        settings, cpus, key = deployment.settings, deployment.replicas.cpus, deployment.key
        self.host, self.http_port, self.grpc_port = host, *free_ports(host, 2)
        self._drain_s = deployment.drain_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._models = [{"model": name} for name in settings.get("engines") or ()] or [{}]
        own = private_folder(deployment.folder)
        for part in ("replicas", replica_id):
            own = private_folder(own / part)
        config, self._log = own / "specdec.yaml", own / "specdec.log"
        found = settings_of(settings, replica_id)
        found = found if cpus is None else _with_threads(found, cpus)
        ports = {"host": host, "http_port": self.http_port, "grpc_port": self.grpc_port, "drain_s": self._drain_s}
        found = merged(found, {"server": ports})
        content = yaml.safe_dump(found, sort_keys=False).encode()  # the first of `engines` is a default
        program = os.path.expanduser(deployment.python or sys.executable)
        if shutil.which(program) is None:
            raise ModelError(f"python: {program} is not there, or cannot be run")
        # `-P`: modules of the working folder are not imported in place of the package's.
        words = [program, "-P", "-m", "specdec.cli.main", "serve", "--config", str(config)]
        self.bound_log()
        try:
            replace_files({config: content})
            log = self._log.open("ab")
            self._log_begin = log.tell()  # former servers of this id wrote what is before
        except OSError as error:
            raise ModelError(f"folder: {own} cannot be written ({error.strerror})") from None
        with log:
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise ModelError(f"python: {program} cannot be run ({error})") from None
        self._client = httpx.AsyncClient(
            base_url=f"http://{authority(host, self.http_port)}", timeout=_REQUEST_S, trust_env=False
        )

    @property
    def alive(self) -> bool:
        """Whether the process runs, ready or not."""
        return self._process.poll() is None

    async def is_ready(self) -> bool:
        """Whether the server accepts requests."""
        try:
            return (await self._client.get("/readyz")).status_code == 200
        except httpx.HTTPError:
            return False

    async def load(self) -> tuple[str, ReplicaLoad]:
        """Returns the server's numeric fingerprint and its load. Of several models: their fingerprints, joined by `+`;
        all that wait, the longest wait, and how busy the busiest is.

        Raises:
            SilentServerError: it does not answer.
            RefusedKeyError: it refuses the key.
            ModelError: it answers with another error.
        """
        answers = [await self._loads(model) for model in self._models]
        loads = [answer["loads"][0] for answer in answers]
        found = ReplicaLoad(
            sum(load["num_waiting_reqs"] for load in loads),
            max(load["forecast_wait_s"] for load in loads),
            max(load["utilization"] for load in loads),
        )
        return "+".join(answer["numeric_fingerprint"] for answer in answers), found

    async def _loads(self, model: dict[str, str]) -> Any:
        try:
            answer = await self._client.get("/v1/loads", params=model, headers=self._headers)
            answer.raise_for_status()
        except httpx.HTTPStatusError as error:
            refusal = f"the server answers {error.response.status_code} to /v1/loads"
            if error.response.status_code in (401, 403):
                raise RefusedKeyError(f"{refusal}; its keys_file needs the key in the model's key_file") from None
            raise ModelError(refusal) from None
        except httpx.HTTPError as error:
            raise SilentServerError(f"the server does not answer: {error!r}") from None
        return answer.json()

    def bound_log(self) -> None:
        """Bounds the server's log; to be called regularly."""
        bound_log(self._log)

    def exit_reason(self) -> str:
        """The exit status, and the end of what this server wrote to the log."""
        tail = log_tail(self._log, self._log_begin)
        return f"the server exited with status {self._process.poll()}; {self._log}: {tail}"

    def kill(self) -> None:
        """Ends the server at once."""
        self._process.kill()

    async def stop(self) -> None:
        """Sends SIGTERM: the server accepts no more calls, and exits when the running ones end or its drain time is
        over. Waits for that, and kills the server if it takes longer."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        late_s = time.monotonic() + self._drain_s + _KILL_AFTER_S
        while self.alive:
            if time.monotonic() > late_s:
                self.kill()
            await asyncio.sleep(0.05)
        await self._client.aclose()


def _with_threads(settings: dict[str, Any], cpus: float) -> dict[str, Any]:
    """``settings`` with a number of threads for each engine. Engines without one share the reserved cores, because
    other replicas use the rest of the machine."""
    cores = max(1, min(int(cpus), usable_cores()))
    config = Config.model_validate(settings)
    if not config.engines:
        engine = {**(settings.get("engine") or {}), "threads": config.engine.threads or cores}
        return {**settings, "engine": engine}
    from server.serving import with_shared_cores  # imports the whole server, which other replicas do without

    shared = with_shared_cores(config.engines, cores)
    engines = {
        name: {**(own or {}), "threads": shared[name].threads} for name, own in settings["engines"].items()
    }  # fmt: skip
    return {**settings, "engines": engines}


def free_ports(host: str, count: int) -> list[int]:
    """Returns free ports. The system hands out all other ports before it repeats one, so they stay free for a while."""
    held = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for each in held:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
