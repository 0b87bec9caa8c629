"""Draft models that are the target: by the same ids, and in a vocabulary of other ids.

Stale draft KV never changes the output, so path identity does not detect it. Here every proposal must be accepted,
whatever happened to the sequence before, greedy and (by the same noise) sampled: only stale KV or wrong ids could be
rejected. The text of other ids is in the tokenizer's own tokenization.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from specdec.core.types import Request, SamplingParams, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine, EngineParts
from tests.core.kv_cache.invariants import check_pages
from tests.draft.tiny_drafts import (
    books_are_closed,
    cross_drafter,
    finished,
    forced,
    fresh,
    own_drafter,
    parts,
    rejected,
    word_ids,
    words,
)

TEMPERATURES = (0.0, 0.7, 1.5)


@cache
def same_parts() -> EngineParts:
    """Parts whose draft model is the target itself."""
    return parts("target", prefill_chunk=24)


@dataclass(frozen=True)
class Twin:
    """An engine's parts, the tokens that it may generate, and prompts of a length that differ by a number."""

    name: str
    parts: Callable[[], EngineParts]
    allowed: Callable[[], tuple[int, ...]]
    prompt: Callable[[int, int], tuple[int, ...]]

    def engine(self, pages: int | None = None) -> Engine:
        return fresh(self.parts(), pages)

    def ask(
        self,
        name: str,
        prompt: tuple[int, ...],
        max_tokens: int = 41,
        speculation: SpeculationParams | None = None,
        **sampling: Any,
    ) -> Request:
        base: dict[str, Any] = {"temperature": 0.0, "seed": 7, "allowed_token_ids": self.allowed()}
        stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, SamplingParams(**(base | sampling)), stopping, speculation=speculation or forced())

    def check_books(self, engine: Engine) -> None:
        """Every page is back, also the draft's own."""
        check_pages(engine._kv, [])
        if self is PERMUTED:
            books_are_closed(own_drafter(self.parts()))


SAME = Twin(
    "same", same_parts, lambda: tuple(range(300)), lambda count, n: tuple((j + 5 + n) % 380 for j in range(count))
)
PERMUTED = Twin("permuted", lambda: parts("permuted"), word_ids, words)


@pytest.fixture(params=[SAME, PERMUTED], ids=lambda twin: twin.name)
def twin(request: pytest.FixtureRequest) -> Twin:
    found: Twin = request.param
    return found


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_prompt_in_chunks_leaves_no_gap(twin: Twin, temperature: float) -> None:
    engine = twin.engine()
    engine.submit(twin.ask("a", twin.prompt(150, 1), temperature=temperature))
    assert rejected(finished(engine)) == 0
    twin.check_books(engine)


def test_a_prompt_longer_than_a_forward_is_read(twin: Twin) -> None:
    engine = twin.engine()
    rows = own_drafter(twin.parts())._decoder.max_rows
    for i, length in enumerate((3 * rows + 7, 2, 2 * rows, rows + 1, 40)):
        engine.submit(twin.ask(f"r{i}", twin.prompt(length, 10 + i)))
    assert rejected(finished(engine), 100) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_prefix_hit_covers_the_draft(twin: Twin, temperature: float) -> None:
    engine, prompt = twin.engine(), twin.prompt(150, 2)
    engine.submit(twin.ask("a", prompt))
    finished(engine)
    engine.submit(twin.ask("b", (*prompt, *twin.prompt(9, 3)), temperature=temperature))
    (done,) = finished(engine)
    assert done.usage.cached_tokens == 150
    assert rejected([done]) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_preemption_is_recovered_from(twin: Twin, temperature: float) -> None:
    engine = twin.engine()
    for i in range(3):
        engine.submit(twin.ask(f"r{i}", twin.prompt(100 + i, i), 120, temperature=temperature))
    for _ in range(3):
        for _ in range(7):
            engine.step()
        engine.preempt_newest()
    done = finished(engine)
    assert sum(event.usage.preemptions for event in done) > 0
    assert rejected(done) == 0
    twin.check_books(engine)


def test_samples_share_a_prompt(twin: Twin) -> None:
    engine = twin.engine()
    engine.submit(twin.ask("a", twin.prompt(150, 4), n=3, temperature=1.0))
    done = finished(engine)
    assert len(done) == 3
    assert rejected(done, 60) == 0


def test_penalties_and_filters_are_the_targets(twin: Twin) -> None:
    engine = twin.engine()
    filters: dict[str, Any] = {
        "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
        "logit_bias": ((twin.allowed()[5], 2.0),),
    }  # fmt: skip
    engine.submit(twin.ask("a", twin.prompt(150, 5), temperature=0.9, **filters))
    assert rejected(finished(engine)) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_wide_tree_contains_the_targets_path(twin: Twin, temperature: float) -> None:
    """With pages for the best child at each level, every step accepts a full path, whatever the other branches."""
    engine = twin.engine()
    engine.submit(twin.ask("a", twin.prompt(150, 6), 61, forced(12, 4, 3), temperature=temperature))
    (done,) = finished(engine)
    stats = done.stats
    assert stats.acceptance_histogram[4] >= stats.num_spec_steps - 1  # the last step has room for less
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens


def test_auto_mode_drafts_and_rejects_nothing(twin: Twin) -> None:
    engine = twin.engine()
    engine.submit(twin.ask("a", twin.prompt(150, 7), 200, SpeculationParams(drafters=("model",), width=1)))
    assert rejected(finished(engine), 0) == 0


def test_aborts_release_all_pages(twin: Twin) -> None:
    engine = twin.engine()
    for i in range(6):
        engine.submit(twin.ask(f"r{i}", twin.prompt(60 + i, i), n=1 + i % 3))
    for i in range(5):
        engine.step()
        engine.step()
        engine.abort(f"r{i}")
    assert rejected(finished(engine)) == 0
    twin.check_books(engine)


def test_accepted_drafts_of_another_vocabulary_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows = own_drafter(parts("permuted"))._decoder, list[int]()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda batch, chosen: rows.append(batch.rows) or forward(batch, chosen))
    engine = PERMUTED.engine()
    engine.submit(PERMUTED.ask("a", words(40, 5)))
    assert rejected(finished(engine)) == 0
    assert rows[0] >= 40
    assert set(rows[1:]) == {1, 2}  # a level; the chain's leaf and the target's own token


def test_a_full_pool_of_another_vocabulary_only_stops_drafting() -> None:
    drafted = []
    for pages in (4, 40):
        drafter = cross_drafter("permuted", pages)
        engine = fresh(replace(parts("permuted"), drafters=[drafter]))
        for i in range(5):
            engine.submit(PERMUTED.ask(f"r{i}", words(100, i)))
        done = finished(engine)
        assert rejected(done) == 0
        drafted.append(sum(event.stats.num_draft_tokens for event in done))
        books_are_closed(drafter)
    assert drafted[0] < drafted[1]
