"""Sequences that wait: a queue by importance, and siblings held back until their leader's prompt is cached."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq

from specdec.sequence import Sequence, SequencePhase


class WaitingQueue:
    """Ordered by ``rank``: priority, then arrival. A preempted sequence so returns to its old place."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self._held: dict[Sequence, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._queue) + sum(map(len, self._held.values()))

    @property
    def head(self) -> Sequence | None:
        """The most important sequence that may be admitted."""
        return self._queue[0] if self._queue else None

    def sequences(self) -> list[Sequence]:
        """All that wait: the queue in order, then those held back."""
        return self._queue + [seq for siblings in self._held.values() for seq in siblings]

    def push(self, seq: Sequence) -> None:
        """Enter the queue."""
        insort(self._queue, seq, key=_rank)

    def hold(self, leader: Sequence, siblings: Seq[Sequence]) -> None:
        """Keep ``siblings`` back until ``leader`` has its whole prompt in the cache."""
        self._held[leader] = list(siblings)

    def pop(self) -> Sequence:
        """Take the head."""
        return self._queue.pop(0)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence wherever it waits; no-op when it does not."""
        if seq in self._queue:
            self._queue.remove(seq)
            return
        for siblings in self._held.values():
            if seq in siblings:
                siblings.remove(seq)
                return

    def let_siblings_in(self) -> None:
        """Queue the siblings whose leader is past its prompt; where it ended before that, the next one leads."""
        for leader in list(self._held):
            past_prompt = leader.state is not SequencePhase.WAITING and leader.n_computed >= leader.n_prompt - 1
            if not past_prompt and leader.state is not SequencePhase.FINISHED:
                continue
            siblings = self._held.pop(leader)
            if not past_prompt and len(siblings) > 1:
                self.hold(siblings[0], siblings[1:])
                siblings = siblings[:1]
            for seq in siblings:
                self.push(seq)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank
