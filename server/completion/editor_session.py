"""Follows one editor: its documents, its generation, and suggestions that go on with what was typed."""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

from server.auth.principal import Principal
from server.completion.coalescing import CoalescedRequest, RequestCoalescer
from server.completion.documents import MAX_CHARACTERS, Gap, TextDocument
from server.completion.requests import CompletionOptions, RequestMaker, gap_rules
from specdec.core.text_stops import Cut, TextCutter
from specdec.core.types import Finished, FinishReason, Request, TextRules
from specdec.errors import RequestError

# Ends that asking again for the same gap may get beyond
_UNFINISHED = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
FURTHEST_AHEAD = 16  # characters typed beyond what was generated; more are prefilled faster than generated


class GenerationRun:
    """Begun for ``gap``, it may go on for later ones. `leave` it once it is of no use.

    ``text``: what may be suggested of it behind the gap. ``ended``: no more comes.
    """

    def __init__(self, gap: Gap, options: CompletionOptions, run: CoalescedRequest) -> None:
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


class Origin(StrEnum):
    """Where the text comes from: a sequence of its own, that of an earlier request, or somebody else's equal one."""

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


_WORD = re.compile(r"\A\w+")
DOCUMENTS = 8
LARGEST_CHANGE = 256  # characters typed or removed after which a former suggestion says nothing about the next
LARGEST_DRAFT = 4096


class EditorSession:
    """One request at a time: a new one supersedes the one before. Belongs to one event loop.

    Where the user typed what the last generation says, it goes on, running or complete, and what it says beyond that
    is the answer. A fresh request for the new text would be given the prompt of that generation and the first tokens it
    said, up to the word that is being typed, and has to spell that word (`PromptPacker`, `Request.healing_prefix`):
    greedy or by seed, its choice is the token that was said, wherever typing has got to in it. So the answer is, to the
    character, the beginning of what a fresh request would get. That holds as long as the tokenizer makes of the typed
    text the tokens that were said, and the prompt's borders stay (a new line may move them; the answer then is still
    the text that was begun). The generation's limits, in tokens, lines and time, count from its own begin. Under
    ``top_p``, which looks at fewer tokens where a word is spelled again, and penalties that count the output's tokens
    the two may differ.

    Else it is ended first, and what was not typed of it goes along as the new request's predicted output. Of one whose
    first token is still to come nothing was typed: it is ended, and its prompt found in the prefix cache.
    """

    def __init__(self, session_id: str, maker: RequestMaker, runs: RequestCoalescer) -> None:
        self.session_id = session_id
        self.documents: OrderedDict[str, TextDocument] = OrderedDict()
        self.used_s = 0.0  # as `SessionTable` has it
        self._maker, self._runs = maker, runs
        self._run: GenerationRun | None = None
        self._former: tuple[str, str] = ("", "")  # what stood before the last suggestion that had a text, and its text

    @property
    def characters(self) -> int:
        """Size of what it keeps."""
        return sum(len(document.text) for document in self.documents.values())

    def keep(self, uri: str, document: TextDocument) -> None:
        """Hold a document; the ones used last stay, as far as there is room."""
        self.documents[uri] = document
        self.documents.move_to_end(uri)
        while len(self.documents) > DOCUMENTS or (self.characters > MAX_CHARACTERS and len(self.documents) > 1):
            self.documents.popitem(last=False)

    async def suggest(
        self,
        gap: Gap,
        options: CompletionOptions,
        principal: Principal,
        check: Callable[[Request], None],
        supersedes_key: str = "",
    ) -> Suggestion:
        """The suggestion for ``gap``, superseding the one before. ``check`` may refuse a new request.

        Cancelling the call leaves nothing running but what ran before; `stop` ends that.

        Raises:
            RequestError: the request is refused.
        """
        suggestion_id = uuid.uuid4().hex
        run = self._run
        if run is not None and (typed := run.typed_for(gap, options)) is not None and await run.goes_on_with(typed):
            rules = gap_rules(gap, options) if typed else None
            return Suggestion(suggestion_id, run, len(typed), rules, Origin.CONTINUED)
        draft = self._draft(gap)
        self.stop()
        request = await self._maker.make(gap, options, principal, suggestion_id, draft)
        check(request)
        shared_run, shared = await self._runs.start(principal, request, supersedes_key)
        self._run = GenerationRun(gap, options, shared_run)
        return Suggestion(suggestion_id, self._run, 0, None, Origin.SHARED if shared else Origin.NEW)

    def stop(self) -> None:
        """End what runs; its text stays known for drafts."""
        if self._run is not None:
            if self._run.text:
                self._former = (self._run.gap.prefix, self._run.text)
            self._run.leave()
            self._run = None

    def _draft(self, gap: Gap) -> str:
        """What is left of the last suggestion, as far as it can be expected here."""
        prefix, text = self._former
        if self._run is not None and self._run.text:
            prefix, text = self._run.gap.prefix, self._run.text
        change = len(gap.prefix) - len(prefix)
        if not text or abs(change) > LARGEST_CHANGE:
            return ""
        if change >= 0 and gap.prefix.startswith(prefix):
            typed = gap.prefix[len(prefix) :]
            agreed = next((i for i, (a, b) in enumerate(zip(typed, text, strict=False)) if a != b), len(typed))
            rest = text[agreed:][:LARGEST_DRAFT]
            # Another word in the place of one: what comes behind that may still come.
            return rest if agreed == len(typed) else _WORD.sub("", rest, count=1)
        if change < 0 and prefix.startswith(gap.prefix):
            return (prefix[len(gap.prefix) :] + text)[:LARGEST_DRAFT]
        return ""
