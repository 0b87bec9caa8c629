"""Runs the server to measure in a child process, and reads its CPU time.

The child runs this module too: ``python -m bench.local_server CONFIG FACTORY TOKENIZER``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Self

import psutil
import uvloop

from server.engine_process import DEFAULT_FACTORY
from server.observe.logs import configure_logs
from server.served_model import LoadTokenizer
from server.serving import Addresses, Serving
from specdec.child_python import die_with_parent, module_command, module_environment
from specdec.config import Config, ExperimentsConfig, KvEventsConfig
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError, SpecdecError
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer

_TAIL_BYTES = 2000  # of the log that an error shows
_STOP_S = 30.0  # seconds to stop after SIGTERM, before SIGKILL


def private_config(config: Config) -> Config:
    """``config`` for a server that only its benchmark uses: free ports of loopback, in the clear and without keys.

    A server.yaml in production names experiments, captures, subscribers and a collector of traces; what a benchmark
    asks is not for them.

    Raises:
        ConfigError: there are `engines`; a benchmark measures one model and changes its settings.
    """
    if config.engines:
        raise ConfigError(
            f"engines: a benchmark measures one model, not {', '.join(config.engines)}; "
            "give a file in which `engine:` describes that one"
        )
    changes = {
        "host": "127.0.0.1", "grpc_port": 0, "http_port": None,
        "keys_file": None, "tls_cert": None, "tls_key": None, "tls_client_ca": None, "capture_dir": None,
        "experiments": ExperimentsConfig(), "kv_events": KvEventsConfig(), "otlp_endpoint": None, "log_texts": False,
    }  # fmt: skip
    return config.model_copy(update={"server": config.server.model_copy(update=changes)})


class ChildServerError(SpecdecError):
    """The server to measure did not start; the message holds the end of its log."""


class LocalServer:
    """Runs specdec with ``config`` as a child process; the system chooses each port that is 0. Use as ``async with``,
    which waits until it is ready.

    The child prints its ports as one line of JSON when it is ready, and ends with the thread that started it.
    factory: ``module:function`` that builds the engine. tokenizer: ``module:function`` that builds the tokenizer;
    empty: the target's.
    """

    def __init__(self, config: Config, *, factory: str = DEFAULT_FACTORY, tokenizer: str = "") -> None:
        words = (config.model_dump_json(exclude_unset=True), factory, tokenizer)
        self._command = [*module_command("bench.local_server"), *words]
        self._process: asyncio.subprocess.Process | None = None
        self.grpc_port = self.http_port = 0

    @property
    def grpc_address(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def frontend(self) -> psutil.Process:
        """The process that listens on the ports."""
        assert self._process is not None  # it is used inside ``async with``
        return psutil.Process(self._process.pid)

    def cpu_s(self) -> float:
        """CPU seconds, user and system, that the front end has used so far."""
        times = self.frontend.cpu_times()
        return float(times.user + times.system)

    async def __aenter__(self) -> Self:
        with tempfile.TemporaryFile() as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
                env=module_environment(),
            )  # fmt: skip
            assert self._process.stdout is not None  # it was asked for as a pipe
            line = await self._process.stdout.readline()
            if not line:
                await self._process.wait()
                log.seek(max(0, log.tell() - _TAIL_BYTES))
                raise ChildServerError(f"the server did not start: {log.read().decode('utf-8', 'replace').strip()}")
        ports = json.loads(line)
        self.grpc_port, self.http_port = ports["grpc_port"], ports["http_port"] or 0
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends SIGTERM and waits for the exit."""
        assert self._process is not None  # it is used inside ``async with``
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def main(config_json: str, factory: str, tokenizer: str) -> int:
    """Serve until SIGTERM, as `LocalServer` says; prints one line of JSON with the ports when ready. Returns the exit
    code."""
    config = Config.model_validate(json.loads(config_json))  # model_validate_json refuses the defaults that are paths
    die_with_parent()
    configure_logs(config.server.log_format, logging.INFO)  # as `specdec serve` does: logging is part of the cost

    def on_ready(addresses: Addresses, info: EngineInfo) -> None:
        print(json.dumps({"grpc_port": addresses.grpc_port, "http_port": addresses.http_port}), flush=True)

    async def serve() -> None:
        await Serving(config, _tokenizer(tokenizer), factory=factory).run(on_ready)

    try:
        uvloop.run(serve())
    except SpecdecError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _tokenizer(place: str) -> LoadTokenizer:
    if not place:
        return lambda engine: load_tokenizer(engine.target, engine.cache_dir)
    build: Callable[[], Tokenizer] = resolve_name(place)
    return lambda _: build()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
