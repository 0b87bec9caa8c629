"""Makes engine requests from gaps: options, text rules derived from the gap's place, and the prompt."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from server.auth.principal import Limits, current_caller
from server.completion.documents import FillMode, Gap
from server.completion.prompt_packer import PackedPrompt, PromptPacker
from server.completion.time_budget import FINE_BUDGET, FIRST_AHEAD, MOST_TOKENS, TimeBudget, budgets, cached_tokens
from specdec.core.text_stops import CLOSERS, CLOSING, CodeReader, close_bracket
from specdec.core.types import Request, SamplingParams, StoppingParams, TextRules
from specdec.errors import EngineDeadError

DEFAULT_MAX_TOKENS = 128
DEFAULT_STOPPING = StoppingParams(max_tokens=DEFAULT_MAX_TOKENS)
LEAST_PRIORITY = -(1 << 31)  # of a prompt that is read ahead
IDLE_POLL_S = 0.05  # between looks whether the engine has other requests


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Options of a completion. Rules set in ``base.stopping`` override ``dedent``, ``bracket`` and ``suffix``."""

    base: Request = field(default_factory=lambda: Request("", (), SamplingParams(temperature=0.0), DEFAULT_STOPPING))
    """The request without id and prompt."""
    mode: FillMode = FillMode.MIDDLE
    max_prompt_tokens: int | None = None  # None: the packer's default
    ttft_ms: float | None = None  # milliseconds to the first token, which limit the prompt; None: no limit
    dedent: bool = True  # end where the text leaves the gap's block
    bracket: bool = True  # end where the text closes a bracket that it did not open
    suffix: bool = True  # end where the text repeats the text after the gap

    @property
    def repeatable(self) -> bool:
        """Whether the same gap always gets the same text."""
        return self.base.sampling.temperature == 0 or self.base.sampling.seed is not None


BRACKETS_BEFORE, BRACKETS_BEHIND = 2000, 1000  # characters examined before and after the gap
_CODE_MARKS = re.compile(r"[()\[\]{}'\"`#/\\\n]")


def open_brackets(prefix: str, suffix: str) -> tuple[str, str]:
    """The brackets that are open after ``prefix`` and that ``suffix`` does not close, innermost first, and the quote or
    comment that the gap is in (`CodeReader.quote`).

    After an editor that closes brackets automatically there are none.
    """
    start = max(0, len(prefix) - BRACKETS_BEFORE)
    start = prefix.find("\n", start - 1) + 1 if start else 0
    reader, needed = CodeReader(), list[str]()
    for char in _code(prefix[start:], reader):
        if char in CLOSERS:
            needed.append(CLOSERS[char])
        else:
            close_bracket(needed, char)
    opened, missing = list[str](), list[str]()
    behind = suffix[:BRACKETS_BEHIND]
    # If no closing quote follows, the completion closes the string.
    string = reader.quote if reader.quote in (behind if len(reader.quote) == 3 else behind.split("\n", 1)[0]) else ""
    for char in _code(behind, CodeReader("#" if reader.quote == "#" else string)):
        if char in CLOSERS:
            opened.append(CLOSERS[char])
        elif not close_bracket(opened, char) and char in needed:
            while (inner := needed.pop()) != char:
                missing.append(inner)
    if len(suffix) <= BRACKETS_BEHIND:
        missing += reversed(needed)
    return "".join(missing), reader.quote


def _code(text: str, reader: CodeReader) -> Iterator[str]:
    """The brackets of ``text`` that are code. ``reader`` gets only the characters that affect its state."""
    end = 0
    for match in _CODE_MARKS.finditer(text):
        if match.start() > end:
            reader.feed(" ")
        end = match.end()
        char = match[0]
        if reader.feed(char) and (char in CLOSERS or char in CLOSING):
            yield char
    if end < len(text):
        reader.feed(" ")


SUFFIX_CHARACTERS = 512


def gap_rules(gap: Gap, options: CompletionOptions) -> TextRules | None:
    """The rules in ``options.base.stopping``, and those derived from the gap: the indentation of the cursor's line, the
    brackets open there, the text after it. None if there are none."""
    rules = options.base.stopping.rules or TextRules()
    head = gap.prefix[gap.prefix.rfind("\n") + 1 :]  # of the cursor's line
    if options.dedent and rules.min_indent is None:
        # None at the margin: nothing is less indented.
        rules = replace(rules, min_indent=len(head) - len(head.lstrip(" \t")) or None)
    if options.bracket and rules.closers is None:
        closers, quote = open_brackets(gap.prefix, gap.suffix)
        rules = replace(rules, closers=closers, quote=quote)
    if options.suffix and not rules.suffix:
        lead = ""
        if not head.strip() and len(head) < len(gap.prefix):
            lead = ("\r\n" if gap.prefix.endswith("\r\n" + head) else "\n") + head
        rules = replace(rules, suffix=gap.suffix[:SUFFIX_CHARACTERS], lead=lead)
    return None if rules == TextRules() else rules


class RequestMaker:
    """Makes prompts that fill gaps and derives the stops. ``packer`` is set once the model is loaded. ``time`` limits
    the prompts of requests with an objective of time to first token."""

    def __init__(self, time: TimeBudget) -> None:
        self.time = time
        self._packer: PromptPacker | None = None

    @property
    def packer(self) -> PromptPacker:
        """The served model's.

        Raises:
            EngineDeadError: it is not loaded yet.
        """
        if self._packer is None:
            raise EngineDeadError("the engine is loading; retry shortly")
        return self._packer

    @packer.setter
    def packer(self, packer: PromptPacker) -> None:
        self._packer = packer

    async def pack_between(
        self, prefix: str, suffix: str, max_tokens: int = 1, *, salt: str = "", ttft_ms: float | None = None
    ) -> PackedPrompt:
        """A prompt that asks for what is missing between two texts, as much of both as leaves room for ``max_tokens``;
        no token is healed. salt: as `Request.cache_salt`. ttft_ms: as in `CompletionOptions`.

        Raises:
            FimNotSupportedError: the model cannot fill in.
            EngineDeadError: it is not loaded yet.
        """
        gap = Gap(prefix, suffix, head_from=len(prefix))
        budget, owner = self.packer.budget(self.packer.max_context, max_tokens), current_caller().scoped(salt)
        return await self._pack(gap, FillMode.MIDDLE, budget, owner, heal=False, ttft_ms=ttft_ms)

    async def pack(self, gap: Gap, options: CompletionOptions) -> PackedPrompt:
        """The prompt for ``gap``; long texts are encoded in a thread.

        Raises:
            FimNotSupportedError: the model cannot fill in, and the options require it.
            EngineDeadError: the model is not loaded yet.
        """
        base = options.base
        budget = self.packer.budget(options.max_prompt_tokens, base.stopping.max_tokens or 1)
        owner = current_caller().scoped(base.cache_salt)
        # The word's beginning may be forbidden by either.
        heal = base.grammar is None and not base.sampling.allowed_token_ids
        return await self._pack(gap, options.mode, budget, owner, heal=heal, ttft_ms=options.ttft_ms)

    async def _pack(
        self, gap: Gap, mode: FillMode, budget: int, owner: str, *, heal: bool, ttft_ms: float | None = None
    ) -> PackedPrompt:
        packer, objective = self.packer, self.time.objective(owner, ttft_ms)
        pack = partial(packer.pack, gap, mode, owner=owner, heal=heal)

        def make() -> PackedPrompt:
            if objective is None:
                return pack(budget)
            packed = objective.choose(pack, budget)
            return replace(packed, omitted=packer.omitted(gap, packed))

        return make() if packer.is_quick(gap, owner) else await asyncio.to_thread(make)

    async def make(self, gap: Gap, options: CompletionOptions, request_id: str, draft: str = "") -> Request:
        """The request for ``gap``, not validated. draft: a text that the answer is expected to resemble. Raises as
        `pack`."""
        base, packed = options.base, await self.pack(gap, options)
        expected = packed.healing_prefix + draft if draft else ""
        return replace(
            base,
            request_id=request_id,
            prompt_ids=packed.ids,
            stopping=replace(packed.limits(base.stopping), rules=gap_rules(gap, options)),
            prediction_ids=self.packer.encode_text(expected, current_caller().scoped(base.cache_salt)),
            healing_prefix=packed.healing_prefix,
            omitted=packed.omitted,
        )

    async def read_ahead(self, gap: Gap, options: CompletionOptions) -> AsyncIterator[Request]:
        """Requests that compute the prompts for ``gap`` into the prefix cache, those of small budgets first, part by
        part. Each waits until the engine has nothing else to do; let it end before the next one.

        A key with limits gets none: they would count against its limits. Raises as `pack`.
        """
        caller, base = current_caller(), options.base
        if caller.limits != Limits():
            return
        owner = caller.scoped(base.cache_salt)
        budget = self.packer.budget(options.max_prompt_tokens, base.stopping.max_tokens or 1)
        large = (each for each in budgets(budget) if each >= FINE_BUDGET)
        for within in sorted({budget, min(budget, FIRST_AHEAD), *large}):
            options = replace(options, max_prompt_tokens=within, ttft_ms=None)
            ids = (await self.pack(gap, options)).ids[:MOST_TOKENS]  # no more are remembered
            while (known := cached_tokens(self.time.computed.of(owner), ids)) < len(ids):
                while self.time.admission.in_flight:
                    await asyncio.sleep(IDLE_POLL_S)
                yield Request(
                    uuid.uuid4().hex,
                    ids[: known + self.time.part()],
                    stopping=StoppingParams(max_tokens=0),
                    priority=LEAST_PRIORITY,
                    cache_salt=base.cache_salt,
                    session=base.session,
                    omitted=(0, 0, 0, 0),
                )
