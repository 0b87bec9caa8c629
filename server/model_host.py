"""One model of a server, from its configuration to its end: engine, front end, tokenizer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.completion.prompt_packer import PromptPacker
from server.engine_client import EngineClient, EngineStartError, RestartPolicy
from server.engine_process import DEFAULT_FACTORY, return_freed_memory
from server.frontend import Frontend
from server.interfaces import ProgressListener, TokenizerLike
from server.large_texts import LARGE_CHARACTERS
from server.model_names import ModelNames
from server.observe.observer import Observer
from specdec.config import Config, EngineConfig, KvEventsConfig
from specdec.core.types import EngineInfo
from specdec.errors import ConfigError
from specdec.models.resolve import is_here

if TYPE_CHECKING:
    from server.kv_events import KvEventPublisher

LoadTokenizer = Callable[[EngineConfig], TokenizerLike]


class ModelHost:
    """``config.engine`` is this model's. ``load_tokenizer`` is called in a thread: while the engine starts where the
    model's files are there, else once it is ready, by when they are. ``spare``: bytes of memory that an engine which
    starts now must leave to others. ``beside``: the front end of another model of the server, whose keys it shares.

    Raises:
        ConfigError: a file of keys or certificates can not be read or used, or a package for events is missing.
    """

    def __init__(
        self,
        config: Config,
        names: ModelNames,
        load_tokenizer: LoadTokenizer,
        observer: Observer,
        *,
        factory: str = DEFAULT_FACTORY,
        progress: ProgressListener | None = None,
        policy: RestartPolicy | None = None,
        spare: Callable[[], int] | None = None,
        beside: Frontend | None = None,
    ) -> None:
        self._config, self._load_tokenizer = config, load_tokenizer
        self.name, self.metrics, self.on_cpu = names.own, observer.metrics, config.engine.device == "cpu"
        self.events = _publisher(config.server.kv_events)
        self.client = EngineClient(
            config, factory=factory, progress=progress, policy=policy, observer=observer, spare=spare,
            cache_feed=self.events,
        )  # fmt: skip
        self.frontend = Frontend(self.client, config.server, names, beside)
        self._tokenizer: asyncio.Future[TokenizerLike] | None = None

    async def start(self) -> None:
        """Begin to load; returns before anything is."""
        await self.client.start()
        engine = self._config.engine
        if await asyncio.to_thread(is_here, engine.target, engine.cache_dir):
            self._begin_tokenizer()

    def _begin_tokenizer(self) -> asyncio.Future[TokenizerLike]:
        if self._tokenizer is None:
            self._tokenizer = asyncio.ensure_future(
                asyncio.to_thread(_warmed, self._load_tokenizer, self._config.engine)
            )
            self._tokenizer.add_done_callback(_seen)  # where the engine fails as well, nobody asks for it
        return self._tokenizer

    async def wait_ready(self) -> EngineInfo:
        """Wait until requests are served.

        Raises:
            EngineStartError: the engine can not be started.
            ModelError: the tokenizer can not be loaded.
        """
        try:
            info = await self.client.wait_ready()
        except EngineStartError as error:
            raise EngineStartError(self.explained(str(error))) from None
        frontend = self.frontend
        tokenizer = await self._begin_tokenizer()
        frontend.fim = await asyncio.to_thread(PromptPacker, tokenizer, info.max_context)
        frontend.tokenizer = tokenizer
        await frontend.experiments.start_configured()
        return info

    def explained(self, message: str) -> str:
        """What the engine said, with its fields as the configuration has them."""
        if not self.name:
            return message
        return f"{self.name}: " + re.sub(r"\bengine\.(?=[a-z])", f"engines.{self.name}.", message)


def _publisher(config: KvEventsConfig) -> KvEventPublisher | None:
    if config.endpoint is None:
        return None
    try:
        from server.kv_events import KvEventPublisher
    except ImportError as error:
        raise ConfigError(
            f"server.kv_events.endpoint: events need a package that is not here ({error.name}); "
            "install it with: pip install 'specdec[kv-events]', or leave endpoint out"
        ) from None
    return KvEventPublisher(config)


def _seen(tokenizer: asyncio.Future[TokenizerLike]) -> None:
    """Its error is not unheard of."""
    if not tokenizer.cancelled():
        tokenizer.exception()


def _warmed(load: LoadTokenizer, config: EngineConfig) -> TokenizerLike:
    """The tokenizer, with what it makes for large texts made now: later it would hold up everybody."""
    tokenizer = load(config)
    tokenizer.encode("a " * LARGE_CHARACTERS)
    assert tokenizer.longest_token > 0
    return_freed_memory()
    return tokenizer
