"""Collects training texts: the target writes prompts of its own and answers them, and continues given texts.

Prompts of its own are made as Magpie makes them (Xu et al., arXiv 2406.08464): behind the chat template's begin of a
user turn, the likeliest continuation is what a user would write.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.engine import Engine
from specdec.models.tokenizer import Tokenizer
from specdec.training.texts import (
    OWN,
    PROMPT_TOKENS,
    TEXT_TOKENS,
    HeldOut,
    Prompt,
    Text,
    TextStore,
    TrainingError,
    chat_lead,
    chat_prompt,
)

Say = Callable[[str], None]
AT_ONCE = 32  # sequences decoded together
_LEAST_PROMPT, _LEAST_ANSWER = 4, 8  # tokens; shorter ones are left out
_MOST_UNUSABLE = 512  # prompts and answers left out since the last text, after which no more is expected
_OWN_PROMPT = SamplingParams(temperature=1.0, top_p=0.95)
_ANSWERS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.7))  # in turn
_LOOK_EVERY = 64  # tokens of an answer between looks for a loop
_LOOP_GRAM = 6  # tokens
_LOOP_SHARE = 0.5  # of the last runs of `_LOOP_GRAM` tokens; where fewer differ, the text repeats itself
_NO_DRAFTS = SpeculationParams(SpeculationMode.OFF)  # at this many sequences a forward has no room for drafts


def repeats_itself(tokens: Seq[int]) -> bool:
    """Whether the last `_LOOK_EVERY` tokens are a loop."""
    last = tokens[-_LOOK_EVERY:]
    grams = [tuple(last[at : at + _LOOP_GRAM]) for at in range(len(last) - _LOOP_GRAM + 1)]
    return len(last) == _LOOK_EVERY and len(set(grams)) < _LOOP_SHARE * len(grams)


@dataclass(slots=True)
class _Writing:
    """A request in flight. prompt: what it answers; None: it writes a prompt."""

    prompt: Prompt | None
    greedy: bool
    tokens: list[int] = field(default_factory=list)


class Collector:
    """Fills a `TextStore` by an idle engine.

    given: prompts from files; while there are some, they take turns with the target's own.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, store: TextStore, held_out: HeldOut, given: Iterable[Prompt] = ()
    ) -> None:
        self._engine, self._tokenizer, self._store, self._held_out = engine, tokenizer, store, held_out
        self._given = iter(given)
        self._lead = tuple(chat_lead(tokenizer) or ()) if tokenizer.has_chat_template else ()
        self._answers: list[Prompt] = []  # prompts of its own that wait for an answer
        self._writing: dict[str, _Writing] = {}
        self._numbers = itertools.count()
        self._seen: set[int] = set()  # hashes of prompts that are in the store, in flight or waiting
        self.n_tokens = 0  # of all texts in the store
        self.n_texts = 0
        self.dropped: Counter[str] = Counter()  # by reason; since the start
        self._unusable = 0  # what the target wrote and was left out since the last text
        for text in store.read():
            self._count(text)

    def _count(self, text: Text) -> None:
        self._unusable = 0
        self.n_texts += 1
        self.n_tokens += len(text.tokens)
        self._seen.add(hash(tuple(text.tokens[: text.answer].tolist())))

    def run(self, tokens: int, say: Say, deadline_s: float = float("inf")) -> str:
        """Collect until the store has ``tokens`` tokens, or `time.monotonic` passes ``deadline_s``.

        Returns why no more could be collected, empty if more could be.

        Raises:
            TrainingError: the disk is full, or nothing could be collected.
        """
        began, before, reason = time.monotonic(), self.n_tokens, ""
        while self.n_tokens < tokens and time.monotonic() < deadline_s:
            while len(self._writing) < AT_ONCE and self._submit():
                pass
            if reason := self._why_no_more():
                if not self.n_texts:
                    raise TrainingError(f"--texts: {reason}; name files of plain text")
                break
            for event in self._engine.step():
                self._take(event)
            seconds = max(time.monotonic() - began, 1e-9)
            rate = (self.n_tokens - before) / seconds
            say(
                f"texts: {self.n_texts}, {self.n_tokens:,} of {tokens:,} tokens, {rate:.0f}/s; "
                f"left out: {self._left_out() or 'none'}"
            )
        for request_id in self._writing:
            self._engine.abort(request_id)
        self._writing.clear()
        return reason

    def _why_no_more(self) -> str:
        """Why no further text is expected; empty while some are."""
        if not self._writing:
            return "the target has no chat template that keeps the user's text, to write prompts with"
        if self._unusable >= _MOST_UNUSABLE:
            return f"none of the last {self._unusable} prompts and answers can be used (left out: {self._left_out()})"
        return ""

    def _left_out(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))

    def _leave_out(self, reason: str) -> None:
        self.dropped[reason] += 1
        self._unusable += 1

    def _submit(self) -> bool:
        """Submit the next request; False if there is none."""
        number = next(self._numbers)
        prompt = self._answers.pop() if self._answers else None
        if prompt is None and (number % 2 or not self._lead):
            prompt = next(self._fresh(), None)
        if prompt is None and not self._lead:
            return False
        if prompt is None:
            sampling, ids, room = _OWN_PROMPT, self._lead, PROMPT_TOKENS - len(self._lead)
        else:
            sampling, ids = _ANSWERS[number // 2 % len(_ANSWERS)], prompt.ids
            room = TEXT_TOKENS - len(ids)
        request = Request(
            str(number), ids, sampling, StoppingParams(max_tokens=room), OutputParams(text=False), _NO_DRAFTS
        )
        self._writing[request.request_id] = _Writing(prompt, greedy=sampling.temperature == 0)
        self._engine.submit(request)
        return True

    def _fresh(self) -> Iterator[Prompt]:
        """Given prompts that the store does not have and that may be trained on."""
        for prompt in self._given:
            if hash(prompt.ids) in self._seen:
                continue
            if self._held_out.overlaps(prompt.ids[prompt.lead :]):
                self.dropped["held out"] += 1
                continue
            self._seen.add(hash(prompt.ids))
            yield prompt

    def _take(self, event: object) -> None:
        if isinstance(event, Delta):
            writing = self._writing[event.request_id]
            before = len(writing.tokens) // _LOOK_EVERY
            writing.tokens += event.token_ids
            if len(writing.tokens) // _LOOK_EVERY > before and repeats_itself(writing.tokens):
                self._drop(event.request_id, "repeating")
        elif isinstance(event, Failed):
            self._drop(event.request_id, "failed")
        elif isinstance(event, Finished) and event.request_id in self._writing:
            writing = self._writing.pop(event.request_id)
            ended = event.reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
            if writing.prompt is None:
                self._take_prompt(writing.tokens, ended)
            else:
                self._take_answer(writing.prompt, writing)

    def _drop(self, request_id: str, reason: str) -> None:
        del self._writing[request_id]
        self._engine.abort(request_id)
        self._leave_out(reason)

    def _take_prompt(self, tokens: list[int], ended: bool) -> None:
        content = self._tokenizer.decode(tokens).strip()
        prompt = chat_prompt([{"role": "user", "content": content}], self._tokenizer, OWN)
        if not ended or prompt is None or len(tokens) < _LEAST_PROMPT:
            self._leave_out("no prompt")
        elif hash(prompt.ids) in self._seen:
            self._leave_out("known")
        elif self._held_out.overlaps(prompt.ids[prompt.lead :]):
            self._leave_out("held out")
        else:
            self._seen.add(hash(prompt.ids))
            self._answers.append(prompt)

    def _take_answer(self, prompt: Prompt, writing: _Writing) -> None:
        tokens = np.array([*prompt.ids, *writing.tokens], np.int32)
        text = Text(tokens, prompt.lead, len(prompt.ids), writing.greedy, prompt.origin)
        if len(writing.tokens) < _LEAST_ANSWER:
            self._leave_out("short")
        elif repeats_itself(writing.tokens):
            self._leave_out("repeating")
        elif self._held_out.overlaps(text.content):
            self._leave_out("held out")
        else:
            self._store.append(text)
            self._count(text)
