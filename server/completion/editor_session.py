"""Editors' sessions: the documents, the generation, and suggestions that continue what the user typed."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from server.admission import Submit
from server.auth.principal import current_caller
from server.completion.documents import MAX_CHARACTERS, Gap, TextDocument, common_length
from server.completion.requests import CompletionOptions, RequestMaker, gap_rules
from server.request_stream import RequestStream
from specdec.core.text_stops import TextCutter
from specdec.core.types import Delta, Finished, FinishReason, Request, TextRules
from specdec.errors import RequestError
from verify_kernels.forward_batch import PAGE_SIZE

# Finish reasons after which a new request for the same gap may get a longer text
_UNFINISHED = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
FURTHEST_AHEAD = 16  # characters typed beyond the generated text; more are prefilled faster than generated


class GenerationRun:
    """A generation started for ``gap``, which may serve later gaps too. `leave` it when it is no longer useful."""

    def __init__(self, gap: Gap, options: CompletionOptions, stream: RequestStream) -> None:
        self.gap, self.options, self._stream = gap, options, stream
        self.finished: Finished | None = None  # the engine's
        self.ended = False  # whether the text is complete
        self.error: RequestError | None = None  # that ended it
        self._text, self._has_tokens = "", False
        self._cut: tuple[int, FinishReason] | None = None
        self._cut_for = 0  # length of what was typed when it was cut
        self._wake = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="completion-reader")

    @property
    def text(self) -> str:
        """The text that may be suggested."""
        return self._text if self._cut is None else self._text[: self._cut[0]]

    @property
    def reason(self) -> FinishReason:
        """Why it ended."""
        if self._cut is not None:
            return self._cut[1]
        return FinishReason.ABORTED if self.finished is None else self.finished.reason

    def typed_for(self, gap: Gap, options: CompletionOptions) -> str | None:
        """The text typed since, if ``gap`` differs from this one only by that; None if more has changed.

        Context files are not compared: changes to them affect the next sequence.
        """
        own = self.gap
        same = options == self.options and (gap.suffix, gap.path, gap.repo) == (own.suffix, own.path, own.repo)
        return gap.prefix[len(own.prefix) :] if same and gap.prefix.startswith(own.prefix) else None

    async def goes_on_with(self, typed: str) -> bool:
        """Whether the generated text starts with ``typed`` and goes on; waits for text that is about to arrive.

        False during the prefill: a request for the longer prefix finds the computed part in the prefix cache.
        """
        if typed and not self._has_tokens:
            return False
        if len(typed) < self._cut_for:
            return False  # the user took something back: the rules of a longer text cut it
        while True:
            text = self.text
            length = min(len(text), len(typed))
            if self.error is not None or text[:length] != typed[:length]:
                return False
            if self.ended:
                if typed:
                    shown = len(text.rstrip() if self.reason is FinishReason.LENGTH else text)
                    return shown > len(typed) and self.reason is not FinishReason.ABORTED
                return self.options.repeatable and self.reason not in _UNFINISHED
            if len(text) >= len(typed):
                return True
            if len(typed) - len(text) > FURTHEST_AHEAD:
                return False
            await self.more(len(text))

    async def more(self, length: int) -> None:
        """Wait until there are more than ``length`` characters, or for the end."""
        while len(self.text) <= length and not self.ended:
            await self._wake.wait()

    def cut(self, place: int, reason: FinishReason, typed: int) -> None:
        """End the text at offset ``place``, because of a rule of the gap after ``typed`` characters, and leave the
        run."""
        self._cut, self._cut_for, self.error = (place, reason), typed, None
        self.leave()

    def leave(self) -> None:
        """Stop reading, which ends the request. May be called again."""
        self._reading.cancel()
        self._end()

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                if isinstance(event, Delta):
                    self._text += event.text
                    self._has_tokens = True
                elif isinstance(event, Finished):
                    self.finished = event
                self._notify()
        except RequestError as error:
            self.error = error
        finally:
            self._end()

    def _notify(self) -> None:
        wake, self._wake = self._wake, asyncio.Event()
        wake.set()

    def _end(self) -> None:
        self.ended = True
        self._stream.close()
        self._notify()


class Suggestion:
    """The text of a run after its first ``typed`` characters."""

    def __init__(
        self, suggestion_id: str, run: GenerationRun, typed: int, rules: TextRules | None, *, continued: bool
    ) -> None:
        """rules: text rules of the new gap, if they differ from the run's. continued: the run is that of an earlier
        request."""
        self.suggestion_id, self.typed, self.continued = suggestion_id, typed, continued
        self.text = ""  # as far as `texts` has yielded it
        self.reason: FinishReason | None = None  # set at the end of `texts`
        self._run, self._cutter = run, TextCutter(rules)

    @property
    def finished(self) -> Finished | None:
        """The engine's figures of the whole sequence; None if the text was cut."""
        return self._run.finished

    async def texts(self) -> AsyncIterator[str]:
        """The text in pieces, as it is generated.

        Raises:
            RequestError: the request was refused, or it failed.
        """
        read = 0
        while True:
            rest = self._run.text[self.typed :]
            cut = self._cutter.feed(rest[read:])
            read = len(rest)
            if cut is not None:
                if piece := self._give(rest, cut.place):
                    yield piece
                self._run.cut(self.typed + cut.place, cut.reason, self.typed)
                break
            if piece := self._give(rest, self._cutter.safe):
                yield piece
            if self._run.ended:
                if self._run.error is not None:
                    raise self._run.error
                last = self._cutter.end()
                if piece := self._give(rest, read if last is None else last.place):
                    yield piece
                break
            await self._run.more(self.typed + read)
        self.reason = self._run.reason

    def _give(self, rest: str, upto: int) -> str:
        piece = rest[len(self.text) : upto]
        self.text += piece
        return piece


_WORD = re.compile(r"\A\w+")
DOCUMENTS = 8  # kept per session
LARGEST_CHANGE = 256  # characters typed or removed beyond which the former suggestion is not used as a draft
LARGEST_DRAFT = 4096  # characters


class EditorSession:
    """One request at a time: a new one supersedes the former. Belongs to one event loop.

    If the user typed the start of the last generation's text, the suggestion is the rest of that text, and the
    generation goes on. This equals, to the character, the start of the answer to a fresh request: its prompt consists
    of the former prompt and the tokens generated for the typed text, up to the word being typed, which the answer
    repeats (`PromptPacker`, `Request.healing_prefix`); greedy or seeded, it chooses the same tokens. The equality holds
    if the tokenizer encodes the typed text as the generated tokens, and if the prompt's borders stay (a new line may
    move them; the suggestion is then still the rest of the text). Limits of tokens, lines and time count from the start
    of the generation. With ``top_p``, which sees fewer tokens while a word is repeated, and with penalties on output
    tokens the two may differ.

    Otherwise the generation is ended, and the rest of its text is the predicted output of the new request.
    """

    def __init__(self, session_id: str, maker: RequestMaker, admit: Submit) -> None:
        """admit: submits a request, as `Admission.admit`."""
        self.session_id = session_id
        self.documents: OrderedDict[str, TextDocument] = OrderedDict()
        self._maker, self._admit = maker, admit
        self._run: GenerationRun | None = None
        self._former: tuple[str, str] = ("", "")  # prefix and text of the last suggestion with a text

    @property
    def characters(self) -> int:
        """Characters of all documents."""
        return sum(len(document.text) for document in self.documents.values())

    def keep(self, uri: str, document: TextDocument) -> None:
        """Store a document; the least recently used are dropped beyond the limits."""
        self.documents[uri] = document
        self.documents.move_to_end(uri)
        while len(self.documents) > DOCUMENTS or (self.characters > MAX_CHARACTERS and len(self.documents) > 1):
            self.documents.popitem(last=False)

    async def suggest(
        self,
        gap: Gap,
        options: CompletionOptions,
        check: Callable[[Request], None],
        supersedes_key: str = "",
    ) -> Suggestion:
        """The suggestion for ``gap``, which supersedes the former one. check: validates a new request.

        Cancelling the call starts nothing; a former generation runs until `stop`.

        Raises:
            RequestError: the request is refused.
        """
        suggestion_id = uuid.uuid4().hex
        run = self._run
        if run is not None and (typed := run.typed_for(gap, options)) is not None and await run.goes_on_with(typed):
            rules = gap_rules(gap, options) if typed else None
            return Suggestion(suggestion_id, run, len(typed), rules, continued=True)
        self.stop()
        request = await self._maker.make(gap, options, suggestion_id, self._draft(gap))
        check(request)
        self._run = GenerationRun(gap, options, self._admit(current_caller(), request, supersedes_key))
        return Suggestion(suggestion_id, self._run, 0, None, continued=False)

    async def read_ahead(self, gap: Gap, options: CompletionOptions, check: Callable[[Request], None]) -> None:
        """Compute the prompts for ``gap`` into the prefix cache; cancel it to stop. check: as in `suggest`.

        Raises:
            RequestError: a request was refused, or it failed.
        """
        async for request in self._maker.read_ahead(gap, options):
            check(request)
            end: Finished | None = None
            async with self._admit(current_caller(), request, "") as stream:
                async for event in stream:
                    end = event if isinstance(event, Finished) else end
            if end is None or end.reason is not FinishReason.LENGTH:
                return  # aborted by another call
            if len(request.prompt_ids) - end.usage.cached_tokens > self._maker.time.part() + PAGE_SIZE:
                return  # the engine has no prefix cache, or has lost the parts before

    def stop(self) -> None:
        """End the generation; its text remains available for drafts."""
        if self._run is not None:
            if self._run.text:
                self._former = (self._run.gap.prefix, self._run.text)
            self._run.leave()
            self._run = None

    def _draft(self, gap: Gap) -> str:
        """The rest of the last suggestion, as far as it is likely here."""
        prefix, text = self._former
        change = len(gap.prefix) - len(prefix)
        if not text or abs(change) > LARGEST_CHANGE:
            return ""
        if change >= 0 and gap.prefix.startswith(prefix):
            typed = gap.prefix[len(prefix) :]
            agreed = common_length(typed, text)
            rest = text[agreed:][:LARGEST_DRAFT]
            # A word was replaced by another: the text after it is still likely.
            return rest if agreed == len(typed) else _WORD.sub("", rest, count=1)
        if change < 0 and prefix.startswith(gap.prefix):
            return (prefix[len(gap.prefix) :] + text)[:LARGEST_DRAFT]
        return ""


SESSIONS, SESSION_CHARACTERS = 256, 1 << 25  # most sessions, and characters of their documents


class SessionTable:
    """Editor sessions, bounded by number and by the size of their documents; the least recently used are evicted. An
    evicted session still serves the stream that holds it. owner: the caller's scope of the prefix cache."""

    def __init__(self, maker: RequestMaker, admit: Submit) -> None:
        """admit: as in `EditorSession`."""
        self._maker, self._admit = maker, admit
        self._sessions: OrderedDict[tuple[str, str], EditorSession] = OrderedDict()

    def open(self, owner: str, session_id: str) -> EditorSession:
        """A session for a new stream. If the editor has reconnected, the former session of the same id and owner is
        stopped and its documents are taken over."""
        session = EditorSession(session_id or uuid.uuid4().hex, self._maker, self._admit)
        former = self._sessions.pop((owner, session.session_id), None)
        if former is not None:
            former.stop()
            session.documents, former.documents = former.documents, OrderedDict()
        self._sessions[owner, session.session_id] = session
        self.used(owner, session)
        return session

    def used(self, owner: str, session: EditorSession) -> None:
        """Mark ``session`` as used, and evict sessions beyond the limits."""
        key = (owner, session.session_id)
        if self._sessions.get(key) is session:
            self._sessions.move_to_end(key)
        total = sum(kept.characters for kept in self._sessions.values())
        while len(self._sessions) > SESSIONS or total > SESSION_CHARACTERS:
            _, oldest = self._sessions.popitem(last=False)
            total -= oldest.characters
