"""The drafter with another vocabulary whose draft is the target under other ids.

All text here is in the tokenizer's own tokenization, so every proposal must be accepted, greedy and sampled, whatever
happens to a sequence: only stale KV or wrong ids could be rejected.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from specdec.core.types import Request, SamplingParams, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine
from tests.draft.tiny_drafts import (
    ROWS,
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


def permuted_engine(pages: int | None = None) -> Engine:
    return fresh(parts("permuted"), pages)


def ask(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 41,
    speculation: SpeculationParams | None = None,
    salt: str = "",
    **sampling: Any,
) -> Request:
    settings: dict[str, Any] = {"temperature": 0.0, "seed": 7, "allowed_token_ids": word_ids()}
    params = SamplingParams(**(settings | sampling))
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, stopping, speculation=speculation or forced(), cache_salt=salt)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_twin_is_always_accepted(temperature: float) -> None:
    engine = permuted_engine()
    engine.submit(ask("a", words(150, 1), temperature=temperature))
    assert rejected(finished(engine)) == 0
    books_are_closed(own_drafter(parts("permuted")))


def test_accepted_drafts_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows = own_drafter(parts("permuted"))._decoder, list[int]()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda batch, chosen: rows.append(batch.rows) or forward(batch, chosen))
    engine = permuted_engine()
    engine.submit(ask("a", words(40, 5)))
    assert rejected(finished(engine)) == 0
    assert rows[0] >= 40
    assert set(rows[1:]) == {1, 2}  # a level; the chain's leaf and the target's own token


def test_a_long_text_is_read_in_parts() -> None:
    engine = permuted_engine()
    for i, length in enumerate((3 * ROWS + 7, 2, 2 * ROWS, ROWS + 1, 40)):
        engine.submit(ask(f"r{i}", words(length, 10 + i)))
    assert rejected(finished(engine), 100) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_its_own_prefix_hits(temperature: float) -> None:
    engine, prompt = permuted_engine(), words(200, 2)
    engine.submit(ask("a", prompt, 60))
    finished(engine)
    engine.submit(ask("b", (*prompt, *words(9, 3)), temperature=temperature))
    assert rejected(finished(engine)) == 0


def test_preemption_has_no_effect() -> None:
    engine = permuted_engine()
    for i in range(3):
        engine.submit(ask(f"r{i}", words(100 + i, i), 120, temperature=0.5 * i))
    for _ in range(3):
        for _ in range(7):
            engine.step()
        engine.preempt_newest()
    done = finished(engine)
    assert sum(event.usage.preemptions for event in done) > 0
    assert rejected(done) == 0
    books_are_closed(own_drafter(parts("permuted")))


def test_samples_share_a_prompt() -> None:
    engine = permuted_engine()
    engine.submit(ask("a", words(150, 4), n=3, temperature=1.0))
    done = finished(engine)
    assert len(done) == 3
    assert rejected(done, 60) == 0


def test_penalties_and_filters_are_the_targets() -> None:
    engine = permuted_engine()
    filters: dict[str, Any] = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    engine.submit(ask("a", words(150, 5), temperature=0.9, **filters))
    assert rejected(finished(engine)) == 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_wide_tree_contains_the_targets_path(temperature: float) -> None:
    engine = permuted_engine()
    engine.submit(ask("a", words(150, 6), 61, forced(12, 4, 3), temperature=temperature))
    (done,) = finished(engine)
    stats = done.stats
    assert stats.acceptance_histogram[4] >= stats.num_spec_steps - 1  # the last step has room for less
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens


def test_auto_mode_drafts_and_rejects_nothing() -> None:
    engine = permuted_engine()
    engine.submit(ask("a", words(150, 7), 200, SpeculationParams(drafters=("model",), width=1)))
    assert rejected(finished(engine), 0) == 0


def test_aborts_release_all_pages() -> None:
    engine, drafter = permuted_engine(), own_drafter(parts("permuted"))
    for i in range(6):
        engine.submit(ask(f"r{i}", words(60 + i, i), n=1 + i % 3))
    for i in range(5):
        engine.step()
        engine.step()
        engine.abort(f"r{i}")
    assert rejected(finished(engine)) == 0
    books_are_closed(drafter)


def test_a_full_pool_only_stops_drafting() -> None:
    drafted = []
    for pages in (4, 40):
        drafter = cross_drafter("permuted", pages)
        engine = fresh(dataclasses.replace(parts("permuted"), drafters=[drafter]))
        for i in range(5):
            engine.submit(ask(f"r{i}", words(100, i)))
        done = finished(engine)
        assert rejected(done) == 0
        drafted.append(sum(event.stats.num_draft_tokens for event in done))
        books_are_closed(drafter)
    assert drafted[0] < drafted[1]
