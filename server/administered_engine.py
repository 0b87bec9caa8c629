"""What operators need of an engine."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from specdec.config import WeightDtype
from specdec.types import EngineInfo


@runtime_checkable
class AdministeredEngine(Protocol):
    """An engine that can be changed while it serves. All but `load_draft` belong to the thread that drives it."""

    def flush_cache(self) -> int:
        """Forget the cached prefixes that no running request uses; returns how many pages that frees."""

    def load_draft(self, draft: str, dtype: WeightDtype | None) -> Any:
        """Load a draft model for `swap_draft`, beside the one in use; may be called from another thread.

        Raises:
            SpecdecError: it can not be had, or does not fit.
        """

    def swap_draft(self, draft: Any | None) -> EngineInfo:
        """Draft with what `load_draft` gave from now on, or with none; returns what the engine is now.

        Raises:
            SpecdecError: it can not be; all is as before.
        """
