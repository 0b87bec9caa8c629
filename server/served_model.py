"""One model of a server, from its configuration to its end, and the models that a server offers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from pathlib import PurePosixPath
from time import time

from server.admission import Admission
from server.async_tokenizer import LARGE_CHARACTERS, AsyncTokenizer
from server.auth.access import Access
from server.completion.editor_session import SessionTable
from server.completion.outcomes import OutcomeLog
from server.completion.prompt_packer import PromptPacker
from server.completion.requests import RequestMaker
from server.completion.time_budget import TimeBudget
from server.engine_client import EngineClient
from server.engine_process import return_freed_memory
from server.engine_supervisor import EngineStartError, EngineState
from server.errors import DrainingError, UnknownModelError
from server.experiment.live.experiments import Experiments
from server.observe.metrics import ServerMetrics
from server.prometheus import Exporter
from specdec.config import EngineConfig, ServerConfig
from specdec.core.types import EngineInfo
from specdec.models.embedding import RANK
from specdec.models.next_edit import WindowReader
from specdec.models.resolve import is_here
from specdec.models.tokenizer import Tokenizer

LoadTokenizer = Callable[[EngineConfig], Tokenizer]


def model_names(served: str) -> frozenset[str]:
    """``served`` and its short forms in lower case: without folder or owner, without ``.gguf``, each with and without
    Ollama's ``:latest``."""
    whole = served.lower()
    last = PurePosixPath(whole).name
    names = {name for full in (whole, last) for name in (full, full.removesuffix(".gguf")) if name}
    return frozenset(names | {f"{name}:latest" for name in names})


class ModelNames:
    """One model's names."""

    def __init__(self, aliases: Sequence[str] = (), own: str = "", all_own: Sequence[str] = ()) -> None:
        """own: its name in the configuration of several models. all_own: the own names of all models of the server."""
        self.aliases, self.own, self.all_own = tuple(aliases), own, tuple(all_own)
        self._exact = frozenset(
            form for name in (own, *aliases) if name for form in (name.lower(), f"{name.lower()}:latest")
        )

    def include_exactly(self, asked: str) -> bool:
        """Whether ``asked`` is the model's own name or one of its aliases."""
        return asked.lower() in self._exact

    def include(self, asked: str, target: str = "") -> bool:
        """Whether ``asked`` names the model. target: the name of its target; empty until the engine is ready."""
        return self.include_exactly(asked) or asked.lower() in model_names(target)


class Task(Enum):
    """What a call that names no model needs one for."""

    ANY = "any"
    FILL = "fill"
    CHAT = "chat"
    EMBED = "embed"
    RERANK = "rerank"


class DrainGate:
    """Every call that generates runs inside `enter`, so that a shutdown can wait for it."""

    def __init__(self) -> None:
        self.inside = 0  # calls that run
        self.is_closed = False  # a shutdown has begun
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count as running for the length of the block.

        Raises:
            DrainingError: the gate is closed.
        """
        if self.is_closed:
            raise DrainingError
        self.inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if self.inside == 0:
                self._empty.set()

    def close(self) -> None:
        """Refuse further calls."""
        self.is_closed = True

    async def drain(self, timeout_s: float) -> int:
        """Close, wait up to ``timeout_s`` seconds until no call runs, and return how many still do."""
        self.close()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return self.inside
        return 0


class ServedModel:
    """A model that requests can be sent to. All protocols share one. Belongs to one event loop.

    It exists before the model is loaded: until then whatever needs the engine or the tokenizer raises EngineDeadError.
    """

    def __init__(
        self,
        client: EngineClient,
        config: ServerConfig | None = None,
        names: ModelNames | None = None,
        beside: ServedModel | None = None,
        metrics: ServerMetrics | None = None,
    ) -> None:
        """config: None: no keys, and the default limits. beside: another model of the same server, with which keys,
        their limits and the log of suggestions are shared. metrics: of the server's files and suggestions.

        Raises:
            ConfigError: a file of keys or certificates cannot be read or used.
        """
        config = config or ServerConfig()
        metrics = metrics or ServerMetrics()
        errors = metrics.file_errors
        self.client, self.names = client, names or ModelNames()
        self.started_s = int(time())  # Unix time
        self.access: Access = Access(config, errors) if beside is None else beside.access
        self.admission: Admission = Admission(client, config, beside=beside.admission if beside else None)
        self.tokenizer = AsyncTokenizer(lambda: client.info, self.admission)
        self.maker = RequestMaker(TimeBudget(client, self.admission))
        self.admission.watch_prompt = self.maker.time.watch
        self.sessions = SessionTable(self.maker, self.admission.admit)
        self.outcomes: OutcomeLog = OutcomeLog(metrics) if beside is None else beside.outcomes
        self.experiments = Experiments(config.experiments, client, self.admission, errors)
        self.gate = DrainGate()
        self.hold_headers = config.hold_headers  # unless a call says otherwise
        self.strict_fields = config.strict_fields  # HTTP bodies with unknown fields are refused
        self._loading: asyncio.Task[Tokenizer] | None = None

    @property
    def info(self) -> EngineInfo:
        """The engine's description.

        Raises:
            EngineDeadError: it is not known yet.
        """
        return self.client.info

    @property
    def name(self) -> str:
        """The model's name in answers; raises as `info`."""
        return self.names.own or self.info.target

    @property
    def fingerprint(self) -> str:
        """Everything beside the request that decides about a seed's tokens: main facts in words, then the numeric
        fingerprint, which covers all of them."""
        info = self.info
        return f"specdec-{info.version}-{info.dtype}-{info.numeric_mode}-{info.numeric_fingerprint}"

    def is_called(self, asked: str) -> bool:
        """Whether ``asked`` is a name of the model; before the engine is known only the configured names are."""
        return self.names.include(asked, self.info.target if self.client.engine.is_known else "")

    def check_name(self, asked: str | None) -> None:
        """Refuse a name that is not the model's; None and "" pass.

        Raises:
            UnknownModelError: it is another.
            EngineDeadError: the served model is not known yet.
        """
        target = self.info.target
        if asked and not self.names.include(asked, target):
            raise UnknownModelError(asked[:200], *(self.names.all_own or (target,)))

    @property
    def takes_requests(self) -> bool:
        """Whether a request would be accepted now."""
        return self.client.engine.is_ready and self.tokenizer.is_loaded and not self.gate.is_closed

    @property
    def fills_in(self) -> bool:
        """Whether the model can fill in the middle of a text; raises EngineDeadError until it is loaded."""
        return self.maker.packer.fills_in

    def can(self, task: Task) -> bool:
        """Whether the model is known to be able to do ``task``."""
        pooling = self.info.pooling if self.client.engine.is_known else ""
        if task in (Task.EMBED, Task.RERANK):
            return bool(pooling) and (pooling == RANK) == (task is Task.RERANK)
        if pooling or task is Task.ANY:
            return not pooling
        return self.tokenizer.is_loaded and (
            self.fills_in if task is Task.FILL else self.tokenizer.loaded.has_chat_template
        )

    def load(self, tokenizer: Tokenizer, packer: PromptPacker | None = None) -> None:
        """Serve with ``tokenizer`` from now on. packer: made from it if None."""
        self.maker.packer = packer or PromptPacker(tokenizer, self.info.max_context)
        self.admission.windows = WindowReader(tokenizer)
        self.tokenizer.load(tokenizer)

    async def start(self, load_tokenizer: LoadTokenizer) -> None:
        """Start the engine and begin to load the tokenizer; returns before either is ready.

        load_tokenizer: called in a thread, once the model's files are in the cache.
        """
        engine = self.client.engine
        await engine.start()
        is_cached = await asyncio.to_thread(is_here, engine.config.target, engine.config.cache_dir)
        self._loading = asyncio.create_task(self._load_tokenizer(load_tokenizer, is_cached))
        # If the engine fails too, nothing awaits the task; its error must be retrieved all the same.
        self._loading.add_done_callback(lambda loading: loading.cancelled() or loading.exception())

    async def _load_tokenizer(self, load: LoadTokenizer, is_cached: bool) -> Tokenizer:
        engine = self.client.engine
        if not is_cached:
            await engine.wait_ready()  # the engine's process downloads the files
        return await asyncio.to_thread(_load_warm, load, engine.config)

    async def wait_ready(self) -> EngineInfo:
        """Wait until requests are served; `start` comes first.

        Raises:
            EngineStartError: the engine cannot be started.
            ModelError: the tokenizer cannot be loaded.
        """
        assert self._loading is not None
        try:
            info = await self.client.engine.wait_ready()
        except EngineStartError as error:
            raise EngineStartError(self.explain(str(error))) from None
        tokenizer = await self._loading
        self.load(tokenizer, await asyncio.to_thread(PromptPacker, tokenizer, info.max_context))
        await self.experiments.start_configured()
        return info

    def explain(self, message: str) -> str:
        """An engine's message, with its fields named as in the configuration of several models."""
        if not self.names.own:
            return message
        return f"{self.names.own}: " + re.sub(r"\bengine\.(?=[a-z])", f"engines.{self.names.own}.", message)


def _load_warm(load: LoadTokenizer, config: EngineConfig) -> Tokenizer:
    """The tokenizer after large texts: its caches are built now, where they delay no call."""
    tokenizer = load(config)
    for parse_special in (False, True):
        tokenizer.encode("a " * LARGE_CHARACTERS, parse_special=parse_special)
    assert tokenizer.longest_token > 0
    return_freed_memory()
    return tokenizer


class Models:
    """The models of a server in the order of the configuration; at least one."""

    exporter: Exporter  # of the metrics of all models; set by `Serving`

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self.were_ready = False  # whether all have become ready, which ends the start

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        """The default model."""
        return self._models[0]

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return len(self._models) > 1

    @property
    def state(self) -> EngineState:
        """The engine's, of several the first that is not ready."""
        states = (model.client.engine.state for model in self._models)
        return next((state for state in states if state != EngineState.READY), EngineState.READY)

    @property
    def take_requests(self) -> bool:
        """Whether the server is ready: with several models once all have been, while any is."""
        return (self.were_ready or not self.several) and any(model.takes_requests for model in self._models)

    def find(self, asked: str, task: Task = Task.ANY) -> ServedModel:
        """The model called ``asked``; without a name, the first that can do ``task``.

        If there is none, returns the first model that is still loading, and may turn out to be it. Otherwise returns
        the first model, which refuses the name or the task in its own words.
        """
        if len(self._models) == 1:
            return self._models[0]
        if asked:
            # First: a target's short form may be another model's own name.
            exact = (model for model in self._models if model.names.include_exactly(asked))
            called = (model for model in self._models if model.is_called(asked))
            fitting: Iterator[ServedModel] = chain(exact, called)
        else:
            fitting = (model for model in self._models if model.can(task))
        loading = (model for model in self._models if not model.tokenizer.is_loaded)
        return next(chain(fitting, loading), self._models[0])

    def named(self, asked: str) -> ServedModel:
        """As `find`.

        Raises:
            UnknownModelError: no model has the name.
            EngineDeadError: it is not known yet whether one has.
        """
        model = self.find(asked)
        if asked:
            model.check_name(asked)
        return model

    async def drain(self, timeout_s: float) -> int:
        """Close every model's gate, wait up to ``timeout_s`` seconds until no call runs, and return how many do."""
        return sum(await asyncio.gather(*(model.gate.drain(timeout_s) for model in self._models)))
