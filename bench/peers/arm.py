"""One way to answer the prompts: an engine with its settings."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "specdec"


@dataclass(frozen=True, slots=True)
class Arm:
    """``engine``: one of `ENGINES`. ``weights``: their numeric type. ``plain``: the name of the arm of the
    same engine and weights that does not speculate; its own where it is that one."""

    name: str
    engine: str
    weights: str
    plain: str

    @property
    def speculates(self) -> bool:
        """Whether it drafts."""
        return self.plain != self.name


OURS_OFF, OURS_AUTO = "specdec off", "specdec auto"
