"""One kernel case to be compiled for one chip, by name, so that another process can do it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """``module``: where the case is named; ``case``, ``kernel`` and ``target``: names."""

    module: str
    case: str
    kernel: str
    target: str

    @property
    def label(self) -> str:
        """The case as reports call it: the module's last name and the case's."""
        return f"{self.module.rpartition('.')[2]}.{self.case}"
