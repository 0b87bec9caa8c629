"""Follows one editor: its documents, and the generation that runs, or ran last, for it."""

from __future__ import annotations

import re
import uuid
from collections import OrderedDict
from collections.abc import Callable

from server.auth.principal import Principal
from server.completion.completion_options import CompletionOptions
from server.completion.gap import Gap
from server.completion.gap_rules import gap_rules
from server.completion.generation_run import GenerationRun
from server.completion.request_maker import RequestMaker
from server.completion.run_table import RunTable
from server.completion.suggestion import Origin, Suggestion
from server.completion.text_document import MAX_CHARACTERS, TextDocument
from specdec.types import Request

_WORD = re.compile(r"\A\w+")
DOCUMENTS = 8
LARGEST_CHANGE = 256  # characters typed or removed after which a former suggestion says nothing about the next
LARGEST_DRAFT = 4096


class EditorSession:
    """One ask at a time: a new one supersedes the one before. Belongs to one event loop.

    Where the user typed what the last generation says, it goes on, running or complete, and what it says beyond that
    is the answer. A fresh request for the new text would be given the prompt of that generation and the first tokens it
    said, up to the word that is being typed, and has to spell that word (`PromptPacker`, `Request.healed`): greedy or
    by seed, its choice is the token that was said, wherever typing has got to in it. So the answer is, to the
    character, the beginning of what a fresh request would get. That holds as long as the tokenizer makes of the typed
    text the tokens that were said, and the prompt's borders stay (a new line may move them; the answer then is still
    the text that was begun). The generation's limits, in tokens, lines and time, count from its own begin. Under
    ``top_p``, which looks at fewer tokens where a word is spelled again, and penalties that count the output's tokens
    the two may differ.

    Else it is ended first, and what was not typed of it goes along as the new request's predicted output. Of one whose
    first token is still to come nothing was typed: it is ended, and its prompt found in the prefix cache.
    """

    def __init__(self, session_id: str, maker: RequestMaker, runs: RunTable) -> None:
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

    async def ask(
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
