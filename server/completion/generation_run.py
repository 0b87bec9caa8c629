"""A session's generation: the gap it was begun for, and its run."""

from __future__ import annotations

from server.completion.completion_options import CompletionOptions
from server.completion.gap import Gap
from server.completion.shared_run import SharedRun
from specdec.errors import RequestError
from specdec.types import Finished, FinishReason

# Ends that asking again for the same gap may get beyond
_UNFINISHED = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
FURTHEST_AHEAD = 16  # characters typed beyond what was generated; more are prefilled faster than generated


class GenerationRun:
    """Begun for ``gap``, it may go on for later ones. `leave` it once it is of no use.

    ``text``: what may be suggested of it behind the gap. ``ended``: no more comes.
    """

    def __init__(self, gap: Gap, options: CompletionOptions, run: SharedRun) -> None:
        self.gap, self.options, self._run = gap, options, run
        self._left = False
        self._cut: tuple[int, FinishReason] | None = None

    @property
    def text(self) -> str:
        """All that is certain."""
        return self._run.text if self._cut is None else self._run.text[: self._cut[0]]

    @property
    def ended(self) -> bool:
        """Whether the text is all there is."""
        return self._cut is not None or self._run.ended

    @property
    def error(self) -> RequestError | None:
        """What ended it instead of an end."""
        return None if self._cut is not None else self._run.error

    @property
    def finished(self) -> Finished | None:
        """The engine's last word, once it is said."""
        return self._run.finished

    @property
    def reason(self) -> FinishReason:
        """Why it ended; what nobody waited for was aborted."""
        if self._cut is not None:
            return self._cut[1]
        return FinishReason.ABORTED if self._run.finished is None else self._run.finished.reason

    def typed_for(self, gap: Gap, options: CompletionOptions) -> str | None:
        """What was typed since, if ``gap`` is this one's but for that; None if more has changed.

        Other texts of the project do not count: what they are now is for the next sequence.
        """
        own = self.gap
        same = options == self.options and (gap.suffix, gap.path, gap.repo) == (own.suffix, own.path, own.repo)
        if not same or not gap.prefix.startswith(own.prefix):
            return None
        return gap.prefix[len(own.prefix) :]

    async def goes_on_with(self, typed: str) -> bool:
        """Whether what was ``typed`` is what it says, and there is more; waits for text that is about to come.

        One whose prompt is still being computed has said nothing: the request for the longer text finds that prompt in
        the prefix cache as far as it goes, and need not guess.
        """
        if typed and not self._run.has_tokens:
            return False
        while True:
            text = self.text
            length = min(len(text), len(typed))
            if self.error is not None or text[:length] != typed[:length]:
                return False
            if self.ended:
                if typed:
                    return len(text) > len(typed) and self.reason is not FinishReason.ABORTED
                return self.options.repeatable and self.reason not in _UNFINISHED
            if len(text) >= len(typed):
                return True
            if len(typed) - len(text) > FURTHEST_AHEAD:
                return False
            await self.more()

    async def more(self) -> None:
        """Wait for text, or for the end."""
        if not self.ended:
            await self._run.more(len(self._run.events))

    def cut(self, place: int, reason: FinishReason) -> None:
        """A rule ends the text at ``place``: what comes behind it is wanted by nobody."""
        self._cut = (place, reason)
        self.leave()

    def leave(self) -> None:
        """Let go of the run: it ends unless somebody else reads it. Any number of times."""
        if not self._left:
            self._left = True
            self._run.leave()
