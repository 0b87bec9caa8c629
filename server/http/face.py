"""What every HTTP endpoint shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import time

from server.completion.completion_service import CompletionService
from server.frontend import Frontend
from server.http.model_names import model_names
from server.request_errors import UnknownModelError
from specdec.types import EngineInfo


@dataclass(frozen=True, slots=True)
class Face:
    """``state`` gives the engine's state and whether a request would be taken now; ``completion`` fills gaps;
    ``started_s`` is Unix time."""

    frontend: Frontend
    state: Callable[[], tuple[str, bool]]
    max_body_bytes: int
    completion: CompletionService
    started_s: int = field(default_factory=lambda: int(time()))

    @property
    def info(self) -> EngineInfo:
        """What the engine is.

        Raises:
            EngineDeadError: it is not known yet.
        """
        return self.frontend.info

    @property
    def fingerprint(self) -> str:
        """What decides about a seed's tokens beside the request: version and numbers."""
        info = self.info
        return f"specdec-{info.version}-{info.dtype}-{info.numeric_mode}"

    def check_model(self, asked: str | None) -> None:
        """Refuse a model that is not the one served; none named is fine.

        Raises:
            UnknownModelError: it is another.
            EngineDeadError: it is not known yet which is served.
        """
        served = self.info.target
        if asked and asked.lower() not in model_names(served):
            raise UnknownModelError(asked[:200], served)
