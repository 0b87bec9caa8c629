"""The whole server: ports, engine, health, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from server.body_budget import MAX_MESSAGE_BYTES, BodyBudget, raise_descriptor_limit
from server.engine_client import EngineClient
from server.engine_process import DEFAULT_FACTORY, bound_malloc, return_freed_memory
from server.engine_supervisor import EngineStartError, EngineSupervisor, RestartPolicy
from server.grpc.server import GrpcServer
from server.http.app import DIALECTS, ENDPOINTS, HttpCalls, build_app, with_cors
from server.http.call import ServerContext
from server.http.http_server import HttpServer
from server.observe.observer import build_observer
from server.observe.records import RequestRecord
from server.prometheus import Exporter, ModelMetrics
from server.served_model import LoadTokenizer, ModelNames, Models, ServedModel
from specdec.config import Config, EngineConfig, KvEventsConfig
from specdec.control_groups import usable_cores
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError, EngineDeadError
from specdec.models.progress import Progress

if TYPE_CHECKING:
    from server.kv_events import KvEventPublisher

_LOG = logging.getLogger(__name__)
_STOP_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server listens."""

    host: str
    grpc_port: int
    http_port: int | None


class Serving:
    """Runs a server from its configuration to its end. ``load_tokenizer`` is called in a thread, once a
    model's files are in the cache.

    Engines are started one after the other, so that each measures its costs alone and sees what memory those before it
    need. From then on they are watched and restarted each by itself; the server ends when none is left.

    Raises:
        ConfigError: a file of keys or certificates cannot be read or used.
    """

    def __init__(
        self,
        config: Config,
        load_tokenizer: LoadTokenizer,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: Progress | None = None,
        policy: RestartPolicy | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._config, self._load_tokenizer = config, load_tokenizer
        self._observer = build_observer(config.server, self._prompt_text, config.engine.target_tpot_ms)
        self._publishers: list[KvEventPublisher] = []
        raise_descriptor_limit()
        supervisor = partial(EngineSupervisor, factory=factory, progress=progress, policy=policy)
        self._make_models(supervisor)
        self.client = self.models.first.client
        messages, bodies = (
            BodyBudget(max_message_bytes, return_freed_memory) for _ in range(2)
        )  # neither port waits for the other
        self._grpc = GrpcServer(config.server, self.models, self._observer, messages)
        self._health_tasks: list[asyncio.Task[None]] = []
        port = config.server.http_port
        self._http: HttpServer | None = None
        if port is not None:
            server = ServerContext(self.models, max_message_bytes)
            tls = self.models.first.access.tls
            app = HttpCalls(build_app(server, ENDPOINTS if config.server.page else DIALECTS), self._observer)
            self._http = HttpServer(with_cors(app, config.server.cors_origins), config.server.host, port, tls, bodies)

    async def start(self) -> Addresses:
        """Listen, not serving yet, and begin to load.

        Raises:
            ConfigError: a port or an address for events cannot be used.
        """
        server = self._config.server
        if server.keys_file is None and not server.on_loopback:
            _LOG.warning(
                "NO KEYS: ANY MACHINE THAT REACHES %s CAN USE THIS SERVER; set server.keys_file to require a key",
                server.host,
            )
        bound_malloc()
        grpc_port = await self._grpc.start()
        try:
            for publisher in self._publishers:
                publisher.open()
            http_port = await self._http.start() if self._http else None
        except BaseException:
            self._close_events()
            await self._grpc.stop()
            raise
        await self.models.first.start(self._load_tokenizer)
        return Addresses(self._config.server.host, grpc_port, http_port)

    async def wait_ready(self) -> EngineInfo:
        """Wait until requests are served.

        Raises:
            EngineStartError: the engine cannot be started.
            ModelError: the tokenizer cannot be loaded.
        """
        for model in self.models:
            if model is not self.models.first:
                await model.start(self._load_tokenizer)
            await model.wait_ready()
            self._health_tasks.append(asyncio.create_task(self._report_health(model), name="health"))
        self.models.were_ready = True
        await self._grpc.report_health()
        return self.client.info

    async def stop(self, drain_s: float = 0.0, *, at_once: bool = False) -> None:
        """Refuse new requests, let running ones finish for up to ``drain_s`` seconds, and end everything. at_once:
        without a grace period for clients, the engine's step or the listeners."""
        await self._grpc.health.enter_graceful_shutdown()  # nothing is served any more
        left = await self.models.drain(drain_s)
        for model in self.models:
            await model.experiments.close()
        if left:
            _LOG.warning("%d calls were still running after %g s and are cut off", left, drain_s)
            for model in self.models:
                model.client.fail_all(EngineDeadError("the server shut down before the request was complete"))
        for task in self._health_tasks:
            task.cancel()
        grace_s = 0.0 if at_once else _STOP_GRACE_S
        await self._grpc.stop(grace_s)
        if self._http is not None:
            await self._http.stop(grace_s)
        await asyncio.gather(*(model.client.engine.close(at_once=at_once) for model in self.models))
        self._close_events()
        for model in self.models:
            model.tokenizer.close()
        if at_once:
            self._observer.hurry()
        await asyncio.to_thread(self._observer.close)  # goes on in its thread if this stop is cancelled

    def _close_events(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    async def run(self, on_ready: Callable[[Addresses, EngineInfo], None]) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP, then drain; a second signal cuts the drain short.

        Raises:
            ConfigError: a port cannot be used.
            EngineStartError: the engine could not be started, or died too often.
        """
        signals: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stop_signals = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it; a terminal that closes sends it
            stop_signals.append(signal.SIGHUP)
        for number in stop_signals:
            loop.add_signal_handler(number, signals.put_nowait, number)
        try:
            addresses = await self.start()
            try:
                await self._serve(addresses, on_ready, signals)
            finally:
                await self._stop_or_second_signal(signals)
        finally:
            for number in stop_signals:
                loop.remove_signal_handler(number)

    async def _serve(
        self, addresses: Addresses, on_ready: Callable[[Addresses, EngineInfo], None], signals: asyncio.Queue[int]
    ) -> None:
        """Until the first signal, or the engine's final failure, which raises."""
        signalled = asyncio.create_task(signals.get())
        failed = asyncio.create_task(self._wait_failed())
        ready = asyncio.create_task(self.wait_ready())
        try:
            await asyncio.wait([signalled, failed, ready], return_when=asyncio.FIRST_COMPLETED)
            if not signalled.done():
                on_ready(addresses, await ready)
                await asyncio.wait([signalled, failed], return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                self._log_stopping(signal.Signals(signalled.result()).name)
            else:
                raise EngineStartError(failed.result())
        finally:
            for task in (signalled, failed, ready):
                task.cancel()

    def _log_stopping(self, name: str) -> None:
        calls = sum(model.gate.inside for model in self.models)
        drain_s = self._config.server.drain_s
        if calls and drain_s:
            many = "1 call" if calls == 1 else f"{calls} calls"
            _LOG.warning("%s: waiting up to %g s for %s to end; a second signal ends at once", name, drain_s, many)
        else:
            _LOG.info("%s: shutting down", name)

    async def _stop_or_second_signal(self, signals: asyncio.Queue[int]) -> None:
        stopping = asyncio.create_task(self.stop(self._config.server.drain_s))
        again = asyncio.create_task(signals.get())
        await asyncio.wait([stopping, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not stopping.done():
            _LOG.warning("second signal: stopping at once")
            stopping.cancel()
            await asyncio.wait([stopping])
            await self.stop(at_once=True)
        else:
            stopping.result()

    async def _wait_failed(self) -> str:
        """Wait until every engine has failed for good or was closed, and return why."""
        reasons = await asyncio.gather(*(model.client.engine.wait_failed() for model in self.models))
        return "; ".join(model.explain(reason) for model, reason in zip(self.models, reasons, strict=True) if reason)

    def _make_models(self, supervisor: Callable[..., EngineSupervisor]) -> None:
        """Make ``_models``, and what exports their metrics."""
        models: list[ServedModel] = []
        exported: list[ModelMetrics] = []
        compat = self._config.server.metrics_compat
        for names, config in _configs(self._config):
            observer, spare = self._observer, None
            if self._config.engines:
                observer, spare = observer.of_model(names.own, config.engine.target_tpot_ms), self._promised
            publisher = _publisher(config.server.kv_events)
            if publisher is not None:
                self._publishers.append(publisher)
            client = EngineClient(supervisor(config, spare=spare, cache_feed=publisher), observer)
            first = models[0] if models else None
            models.append(ServedModel(client, config.server, names, first, self._observer.metrics))
            exported.append(ModelMetrics(observer.metrics, client, compat, names.own))
        self.models = Models(models)
        self.models.exporter = Exporter(self._observer.metrics, exported, compat)

    def _prompt_text(self, record: RequestRecord) -> str:
        return self.models.find(record.model).tokenizer.loaded.decode(record.request.prompt_ids)

    def _promised(self) -> int:
        return sum(model.client.engine.promised_bytes for model in self.models)

    async def _report_health(self, model: ServedModel) -> None:
        """Report to gRPC's health service after every change of the engine's state."""
        while True:
            change = model.client.engine.change
            await self._grpc.report_health()
            await change.wait()


def with_shared_cores(engines: Mapping[str, EngineConfig], cores: int | None = None) -> dict[str, EngineConfig]:
    """``engines`` with a number of threads each. Engines without a setting share the remaining cores equally, with at
    least one thread. cores: default: those that this process may use."""
    cores = usable_cores() if cores is None else cores
    wanted = sum(engine.threads for engine in engines.values())
    if wanted > cores:
        fields = ", ".join(f"engines.{name}.threads" for name, engine in engines.items() if engine.threads)
        _LOG.warning("%s: %d threads on %d cores slow each other down while all engines work", fields, wanted, cores)
    open_ended = [name for name, engine in engines.items() if not engine.threads]
    found = dict(engines)
    left = max(0, cores - wanted)
    for place, name in enumerate(open_ended):
        part = left // len(open_ended) + (place < left % len(open_ended))
        found[name] = engines[name].model_copy(update={"threads": max(1, part)})
    return found


def _configs(config: Config) -> Iterator[tuple[ModelNames, Config]]:
    """Names and configuration of each model; of one alone, the configuration as it is."""
    if not config.engines:
        yield ModelNames(config.engine.aliases), config
        return
    for place, (name, engine) in enumerate(with_shared_cores(config.engines).items()):
        own: dict[str, Any] = {} if place == 0 else {"start": ()}
        if (folder := config.server.experiments.folder) is not None:
            own["folder"] = folder / name
        experiments = config.server.experiments.model_copy(update=own)
        events = config.server.kv_events.of_model(place)
        server = config.server.model_copy(update={"experiments": experiments, "kv_events": events})
        names = ModelNames(engine.aliases, name, tuple(config.engines))
        yield names, config.model_copy(update={"engine": engine, "server": server})


def _publisher(config: KvEventsConfig) -> KvEventPublisher | None:
    if config.endpoint is None:
        return None
    try:
        from server.kv_events import KvEventPublisher
    except ImportError as error:
        raise ConfigError(
            f"server.kv_events.endpoint: events need a package that is not installed ({error.name}); "
            "run pip install '.[kv-events]' in specdec's checkout, or leave endpoint out"
        ) from None
    return KvEventPublisher(config)
