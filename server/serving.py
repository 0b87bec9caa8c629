"""The whole server: ports, engine, health, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass

from server.completion.prompt_packer import PromptPacker
from server.engine_client import EngineClient, EngineStartError, EngineState, RestartPolicy
from server.engine_process import DEFAULT_FACTORY
from server.frontend import Frontend
from server.grpc.server import GrpcServer
from server.http.app import DIALECTS, ENDPOINTS, build_app, with_cors
from server.http.call import ServerContext
from server.http.call_records import HttpCalls
from server.http.http_server import HttpServer
from server.interfaces import ProgressListener, TokenizerLike
from server.large_texts import LARGE_CHARACTERS
from server.model_names import ModelNames
from server.observe.gpus import Gpus
from server.observe.observer import build_observer
from server.prometheus import Exporter
from server.served_models import Models
from specdec.config import Config
from specdec.errors import EngineDeadError
from specdec.types import EngineInfo

_LOG = logging.getLogger(__name__)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server listens."""

    host: str
    grpc_port: int
    http_port: int | None


class Serving:
    """Runs a server from its configuration to its end. ``load_tokenizer`` is called once the engine is ready, in a
    thread: by then the model's files are there.

    Raises:
        ConfigError: a file of keys or certificates can not be read or used.
    """

    def __init__(
        self,
        config: Config,
        load_tokenizer: Callable[[], TokenizerLike],
        *,
        factory: str = DEFAULT_FACTORY,
        progress: ProgressListener | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._config, self._load_tokenizer = config, load_tokenizer
        self._observer = build_observer(
            config.server, lambda ids: self._frontend.loaded_tokenizer.decode(ids), config.engine.target_tpot_ms
        )
        self.client = EngineClient(config, factory=factory, progress=progress, policy=policy, observer=self._observer)
        self._frontend = Frontend(self.client, config.server, ModelNames(config.engine.aliases))
        self._frontend.exporter = Exporter(
            self._observer.metrics, self.client, config.server.metrics_compat,
            None if config.engine.device == "cpu" else Gpus(),
        )  # fmt: skip
        self._models = Models([self._frontend])
        self._grpc = GrpcServer(config.server, self._models, self._observer)
        self._health_task: asyncio.Task[None] | None = None
        port = config.server.http_port
        self._http: HttpServer | None = None
        if port is not None:
            server = ServerContext.of(self._models, self._probe_state, config.server.max_message_bytes)
            tls = self._frontend.access.ssl_context()
            app = HttpCalls(build_app(server, ENDPOINTS if config.server.page else DIALECTS), self._observer)
            self._http = HttpServer(with_cors(app, config.server.cors_origins), config.server.host, port, tls)

    @property
    def knows_chat(self) -> bool:
        """Whether a conversation can be sent: the model is loaded and has a chat template."""
        tokenizer = self._frontend.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    async def start(self) -> Addresses:
        """Listen, not serving yet, and begin to load.

        Raises:
            ConfigError: a port can not be had.
        """
        grpc_port = await self._grpc.start()
        try:
            http_port = await self._http.start() if self._http else None
        except BaseException:
            await self._grpc.stop()
            raise
        await self.client.start()
        return Addresses(self._config.server.host, grpc_port, http_port)

    async def wait_ready(self) -> EngineInfo:
        """Wait until requests are served.

        Raises:
            EngineStartError: the engine can not be started.
            ModelError: the tokenizer can not be loaded.
        """
        info = await self.client.wait_ready()
        tokenizer = await asyncio.to_thread(_warmed, self._load_tokenizer)
        self._frontend.fim = await asyncio.to_thread(PromptPacker, tokenizer, info.max_context)
        self._frontend.tokenizer = tokenizer
        await self._frontend.experiments.start_configured()
        self._health_task = asyncio.create_task(self._report_health(), name="health")
        return info

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no new request, let running ones finish for up to ``drain_s`` seconds, and end everything."""
        await self._grpc.begin_shutdown()
        left = await self._models.drain(drain_s)
        await self._frontend.experiments.close()
        if left:
            _LOG.warning("%d calls were still running after %g s and are cut off", left, drain_s)
            self.client.fail_all(EngineDeadError("the server shut down before the request was complete"))
        if self._health_task is not None:
            self._health_task.cancel()
        await self._grpc.stop()
        if self._http is not None:
            await self._http.stop()
        await self.client.close()
        self._frontend.close()
        await asyncio.to_thread(self._observer.close)

    async def run(self, on_ready: Callable[[Addresses, EngineInfo], None]) -> None:
        """Serve until SIGTERM or SIGINT, then drain; a second signal cuts the drain short.

        Raises:
            ConfigError: a port can not be had.
            EngineStartError: the engine could not be started, or died too often.
        """
        signals: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            addresses = await self.start()
            try:
                await self._serve(addresses, on_ready, signals)
            finally:
                await self._stop_or_second_signal(signals)
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    async def _serve(
        self, addresses: Addresses, on_ready: Callable[[Addresses, EngineInfo], None], signals: asyncio.Queue[int]
    ) -> None:
        """Until the first signal, or the engine's final failure, which raises."""
        signalled = asyncio.create_task(signals.get())
        failed = asyncio.create_task(self.client.wait_failed())
        ready = asyncio.create_task(self.wait_ready())
        try:
            await asyncio.wait([signalled, failed, ready], return_when=asyncio.FIRST_COMPLETED)
            if not signalled.done():
                on_ready(addresses, await ready)
                await asyncio.wait([signalled, failed], return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                _LOG.info("%s: shutting down", signal.Signals(signalled.result()).name)
            else:
                raise EngineStartError(failed.result())
        finally:
            for task in (signalled, failed, ready):
                task.cancel()

    async def _stop_or_second_signal(self, signals: asyncio.Queue[int]) -> None:
        stopping = asyncio.create_task(self.stop(self._config.server.drain_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            _LOG.warning("second signal: stopping at once")
            stopping.cancel()
            await asyncio.wait([stopping])
            await self.stop()
        else:
            stopping.result()

    async def _report_health(self) -> None:
        states = self.client.watch()
        while True:
            await self._grpc.set_serving(await states.get() == EngineState.READY)

    def _probe_state(self) -> tuple[str, bool]:
        ready = self.client.state == EngineState.READY and self._frontend.tokenizer is not None
        return self.client.state, ready and not self._frontend.gate.is_closed


def _warmed(load: Callable[[], TokenizerLike]) -> TokenizerLike:
    """The tokenizer, with what it makes for large texts made now: later it would hold up everybody."""
    tokenizer = load()
    tokenizer.encode("a " * LARGE_CHARACTERS)
    assert tokenizer.longest_token > 0
    return tokenizer
