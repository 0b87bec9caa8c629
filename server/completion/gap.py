"""A gap in a text: what a completion is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from server.completion.context_file import ContextFile


class FillMode(StrEnum):
    """What to do about the text behind the gap."""

    MIDDLE = "middle"
    MIDDLE_OR_PREFIX = "middle_or_prefix"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Gap:
    """Texts before and after a cursor, and where they come from.

    ``head_from``: offset in ``prefix`` of what the model is shown as the begin of what it fills in; None: as suits
    prefix hits best.
    """

    prefix: str
    suffix: str = ""
    head_from: int | None = None
    files: tuple[ContextFile, ...] = ()
    repo: str = ""
    path: str = ""
    language: str = ""

    @property
    def line_head(self) -> str:
        """The cursor's line in front of it."""
        return self.prefix[self.prefix.rfind("\n") + 1 :]
