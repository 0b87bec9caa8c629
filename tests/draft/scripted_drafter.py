"""A scripted drafter."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree

Make = Callable[[DraftTask], TokenTree]


class Scripted(ModelBasedDrafter):
    """A drafter whose proposals a function computes from each task, and that raises in the given methods."""

    def __init__(self, name: str, make: Make, model_based: bool = False) -> None:
        self.name, self.make, self.model_based = name, make, model_based
        self.calls: list[str] = []
        self.raises: set[str] = set()
        self.owes: Any = 0
        self.owes_tail: Any = None  # without the start of the text; None: the same

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method in self.raises:
            raise RuntimeError(method)

    def begin(self, sequence: Sequence) -> None:
        self._called("begin")

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        self._called("observe")

    def rewind(self, sequence: Sequence) -> None:
        self._called("rewind")

    def end(self, sequence: Sequence) -> None:
        self._called("end")

    def pending_prefill(self, sequence: Sequence) -> int:
        self._called("pending_prefill")
        answer: int = self.owes
        return answer

    def tail_prefill(self, sequence: Sequence) -> int:
        self._called("tail_prefill")
        answer: int = self.owes if self.owes_tail is None else self.owes_tail
        return answer

    def warm_up(self, rows: int) -> None:
        self._called("warm_up")

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        self._called("propose")
        return [self.make(task) for task in tasks]
