"""The models that one server offers, each with an engine of its own, and which of them a call means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from server.completion.service import CompletionService, OutcomeLog
from server.frontend import Frontend
from server.prometheus import Registry


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's front end, and code completion with it."""

    frontend: Frontend
    completion: CompletionService


class Task(Enum):
    """What a call that names no model needs one for."""

    ANY = "any"
    FILL = "fill"
    CHAT = "chat"


_CAN: dict[Task, Callable[[Frontend], bool]] = {
    Task.ANY: lambda frontend: True,
    Task.FILL: lambda frontend: frontend.is_loaded and frontend.fills_in,
    Task.CHAT: lambda frontend: frontend.is_loaded and frontend.loaded_tokenizer.has_chat_template,
}


class Models:
    """In the order of the configuration; at least one. ``exporter`` tells their metrics, where they are kept."""

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        outcomes = OutcomeLog()  # a suggestion is told of by its id, whichever model made it
        self.exporter: Registry | None = None
        self._models = tuple(_served(frontend, outcomes) for frontend in frontends)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def first(self) -> ServedModel:
        """The one for calls that name none and need nothing special."""
        return self._models[0]

    @property
    def several(self) -> bool:
        """Whether there is a choice."""
        return len(self._models) > 1

    def find(self, asked: str, task: Task = Task.ANY) -> ServedModel:
        """The model of a name; without one, the first that can do ``task``. Where there is none, the first that is not
        loaded yet, and may be it: it asks to come back. Else the first of all: it refuses the name or the task in its
        own words."""
        if len(self._models) == 1:
            return self._models[0]
        if asked:
            fitting = (model for model in self._models if model.frontend.is_called(asked))
        else:
            fitting = (model for model in self._models if _CAN[task](model.frontend))
        loading = (model for model in self._models if not model.frontend.is_loaded)
        return next(chain(fitting, loading), self._models[0])

    async def drain(self, timeout_s: float) -> int:
        """Close every model's gate, wait up to ``timeout_s`` seconds until nobody is inside, and return how many still
        are."""
        return sum(await asyncio.gather(*(model.frontend.gate.drain(timeout_s) for model in self._models)))

    def named(self, asked: str) -> Frontend:
        """As `find`.

        Raises:
            UnknownModelError: there is none of the name.
            EngineDeadError: it is not known yet whether there is.
        """
        frontend = self.find(asked).frontend
        if asked:
            frontend.check_model(asked)
        return frontend


def _served(frontend: Frontend, outcomes: OutcomeLog) -> ServedModel:
    admission = frontend.admission
    submit = lambda caller, request, key: admission.admit(caller, request, supersedes_key=key)  # noqa: E731
    return ServedModel(frontend, CompletionService(frontend, submit, outcomes))
