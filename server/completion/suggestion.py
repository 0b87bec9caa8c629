"""What one ask of a session is answered with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum

from server.completion.generation_run import GenerationRun
from specdec.step.stops.text_cutter import Cut, TextCutter
from specdec.types import Finished, FinishReason, TextRules


class Origin(StrEnum):
    """Where the text comes from: a sequence of its own, that of an earlier ask, or somebody else's equal one."""

    NEW = "new"
    CONTINUED = "continued"
    SHARED = "shared"


class Suggestion:
    """The text of a run beyond its first ``typed`` characters. ``rules``: those of the place where it is put, if they
    are not the run's own. ``text``: what was given out; ``reason``: why it ended, once `texts` has."""

    def __init__(
        self, suggestion_id: str, run: GenerationRun, typed: int, rules: TextRules | None, origin: Origin
    ) -> None:
        self.suggestion_id, self.typed, self.origin = suggestion_id, typed, origin
        self.text = ""
        self.reason: FinishReason | None = None
        self._run = run
        self._cutter = None if rules is None else TextCutter(rules)

    @property
    def finished(self) -> Finished | None:
        """The engine's figures, of the whole sequence; None where it was cut short."""
        return self._run.finished

    async def texts(self) -> AsyncIterator[str]:
        """The text in pieces, as it comes.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        read = 0
        while True:
            rest = self._run.text[self.typed :]
            cut = self._feed(rest[read:])
            read = len(rest)
            if cut is not None:
                if piece := self._give(rest, cut.place):
                    yield piece
                self._run.cut(self.typed + cut.place, cut.reason)
                break
            if piece := self._give(rest, read if self._cutter is None else self._cutter.safe):
                yield piece
            if self._run.ended:
                if self._run.error is not None:
                    raise self._run.error
                last = None if self._cutter is None else self._cutter.end()
                if piece := self._give(rest, read if last is None else last.place):
                    yield piece
                break
            await self._run.more()
        self.reason = self._run.reason

    def _feed(self, text: str) -> Cut | None:
        return None if self._cutter is None else self._cutter.feed(text)

    def _give(self, rest: str, upto: int) -> str:
        piece = rest[len(self.text) : upto]
        self.text += piece
        return piece
