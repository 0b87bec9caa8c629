"""Exceptions at every call that the engine makes into its stages: they end at most the request they belong to."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draft.grammar import GrammarDrafter
from draft.manager import DrafterManager
from draft.suffix import SuffixDrafter
from specdec.config import SpeculationConfig
from specdec.control.controller import Controller
from specdec.control.trace import TraceLog, TraceWriter
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.text_stops import TextCutter, TextStream
from specdec.core.types import (
    Delta,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    ResumeParams,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
    TextRules,
)
from specdec.engine import step
from specdec.engine.engine import Engine
from specdec.engine.profile_cache import LearnedProfile
from specdec.engine.propose import Drafting
from specdec.grammar.state import GrammarState, TokenHealing
from tests.core.kv_cache.invariants import check_pages
from tests.engine.tiny_engine import drain, failures, run_all, tiny_engine, tiny_parts, tokens_of

CALLS: list[tuple[type | ModuleType, str, str]] = [
    (SequenceSampling, "row", "sampling"),
    (SequenceSampling, "commit", "commit"),
    (Sampler, "sample", ""),
    (GrammarState, "mask", "grammar"),
    (GrammarState, "commit", "grammar"),
    (GrammarState, "forced", ""),
    (TokenHealing, "mask", "grammar"),
    (TokenHealing, "commit", "grammar"),
    (TextStream, "push", "stop rules"),
    (TextStream, "flush", "stop rules"),
    (TextStream, "end_at_line", "stop rules"),
    (TextCutter, "feed", "stop rules"),
    (Sequence, "expired", "stop rules"),
    (Sequence, "held_back", "stop rules"),
    (Sequence, "take", "commit"),
    (Sequence, "count_step", "commit"),
    (Drafting, "want", "drafting"),
    (Drafting, "learn", ""),
    (DrafterManager, "begin", "drafting"),
    (DrafterManager, "observe", "commit"),
    (DrafterManager, "rewind", "drafting"),
    (DrafterManager, "end", ""),
    (DrafterManager, "propose", ""),
    (DrafterManager, "may_propose", ""),
    (DrafterManager, "may_draft", "drafting"),
    (DrafterManager, "pending_prefill", ""),
    (SuffixDrafter, "begin", ""),
    (SuffixDrafter, "fill", ""),
    (SuffixDrafter, "end", ""),
    (Controller, "enter", ""),
    (Controller, "decide", ""),
    (Controller, "odds", ""),
    (Controller, "observe", ""),
    (step, "step_trace", ""),
    (step, "step_record", ""),
    (TraceLog, "add", ""),
    (TraceWriter, "write", ""),
    (KvCacheManager, "publish", "publishing"),
    (KvCacheManager, "key_of", "publishing"),
]
"""Class or module, function, and the stage that the failed request names; empty: the fault belongs to no request."""
ON, OFF = SpeculationMode.ON, SpeculationMode.OFF
YES_NO = GrammarParams(GrammarKind.CHOICE, '["yes indeed, it is so", "no thanks, never again"]')
WHOLE = ("greedy", "sampled", "grammar", "healed", "pair")
CUT_OFF = ("timed", "lined")


def requests() -> list[Request]:
    long = StoppingParams(max_tokens=24, ignore_eos=True)
    prompt = tuple(tiny_parts().tokenizer.encode("def add(first, second):\n    return first + second\n"))
    rules = dataclasses.replace(long, stop=("never said",), rules=TextRules(max_lines=400))
    make = functools.partial(Request, prompt_ids=prompt)
    warm, cold = SamplingParams(temperature=0.9, seed=3), SamplingParams(temperature=0.0, seed=4)
    limited, off = dataclasses.replace(long, max_tokens=100, time_limit_s=1.0), SpeculationParams(OFF)
    lined = dataclasses.replace(limited, time_limit_s=1.5, finish_line=True)
    two, on = dataclasses.replace(warm, n=2, repetition_penalty=1.2), SpeculationParams(ON)
    return [
        make("greedy", sampling=cold, stopping=long, speculation=on),
        make("sampled", sampling=warm, stopping=rules, output=OutputParams(logprobs=2)),
        make("grammar", sampling=warm, stopping=StoppingParams(max_tokens=60), grammar=YES_NO, speculation=on),
        make("healed", sampling=cold, stopping=long, healing_prefix="ret", speculation=on),
        make("pair", sampling=two, stopping=long),
        make("timed", sampling=dataclasses.replace(warm, n=2), stopping=limited, speculation=off),
        make("lined", sampling=cold, stopping=lined, speculation=off),
    ]


def fresh_engine(trace: Path) -> Engine:
    """All stages take part: a trace file, drafters of all kinds, few pages, a clock of 10 ms per look."""
    parts, now = tiny_parts(), 0.0

    def clock() -> float:
        nonlocal now
        now += 0.01
        return now

    speculation: SpeculationConfig = parts.config.speculation.model_copy(update={"trace_file": trace})
    drafters = [GrammarDrafter(), *parts.drafters]
    profile = LearnedProfile(trace.parent, "target")
    parts = dataclasses.replace(parts, drafters=drafters, clock=clock, learned_file=profile)
    engine = tiny_engine(parts, pages=12, speculation=speculation)
    return engine


def run(engine: Engine) -> list[RequestEvent]:
    """All requests together, with preemptions, then one that evicts their pages."""
    for request in requests():
        engine.submit(request)
    events: list[RequestEvent] = []
    for turn in range(400):
        if not engine.has_work():
            break
        if turn % 5 == 4:
            engine.preempt_newest()
        events += engine.step()
    events += drain(engine)
    engine.flush_cache()
    return events


def outputs(events: list[RequestEvent]) -> dict[tuple[str, int], list[Any]]:
    """Per sample its tokens, with their log-probabilities where requested."""
    found: dict[tuple[str, int], list[Any]] = {(name, i): [] for name in (*WHOLE, *CUT_OFF) for i in range(2)}
    for event in events:
        if isinstance(event, Delta):
            found[event.request_id, event.index] += event.logprobs or event.token_ids
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Any]]:
    engine = fresh_engine(tmp_path_factory.mktemp("undisturbed") / "t.jsonl")
    events = run(engine)
    assert not failures(events)
    engine.close()
    return outputs(events)


def called_by_a_drafter() -> bool:
    """Drafters sample and read grammars too; their faults are theirs."""
    return any("/draft/" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))


@pytest.mark.parametrize("at_call", [1, 9])
@pytest.mark.parametrize(("owner", "method", "stage"), CALLS, ids=[f"{c.__name__}.{m}" for c, m, _ in CALLS])
def test_an_error_ends_only_its_own_request(
    owner: type | ModuleType,
    method: str,
    stage: str,
    at_call: int,
    undisturbed: dict[tuple[str, int], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, calls = fresh_engine(tmp_path / "t.jsonl"), 0
    original: Any = owner.__dict__[method]
    inner = original.__func__ if isinstance(original, classmethod | staticmethod) else original

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if stage in ("sampling", "grammar") and called_by_a_drafter():
            return inner(*args, **kwargs)
        calls += 1
        if calls == at_call:
            raise RuntimeError("injected")
        return inner(*args, **kwargs)

    wrapped = type(original)(faulty) if isinstance(original, classmethod | staticmethod) else faulty
    monkeypatch.setattr(owner, method, wrapped)
    events = run(engine)
    monkeypatch.undo()
    assert calls >= 1
    failed = failures(events)
    if stage and calls >= at_call:
        (failure,) = failed
        assert failure.reason == "INTERNAL"
        assert failure.message.startswith(f"{stage} failed (RuntimeError: injected)")
    else:
        assert not failed
    victims = {failure.request_id for failure in failed}
    for (name, index), tokens in outputs(events).items():
        expected = undisturbed[name, index]
        if name in WHOLE and name not in victims:
            assert tokens == expected
        else:
            shared = min(len(tokens), len(expected))
            assert tokens[:shared] == expected[:shared]
    check_pages(engine._kv, [])
    load = engine.load()
    assert (load.running_requests, load.waiting_requests) == (0, 0)
    assert load.free_pages == load.total_pages
    again = run_all(engine, [dataclasses.replace(requests()[0], request_id="again")])
    assert tokens_of(again, "again") == undisturbed["greedy", 0]
    engine.close()


def test_a_row_that_cannot_be_sampled_ends_only_its_request(
    undisturbed: dict[tuple[str, int], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch cannot be sampled either, at any step."""
    original = Sampler.sample

    def faulty(self: Sampler, logits: Any, rows: Any, *rest: Any) -> Any:
        if any(row.policy.seed == requests()[0].sampling.seed for row in rows):
            raise RuntimeError("injected")
        return original(self, logits, rows, *rest)

    monkeypatch.setattr(Sampler, "sample", faulty)
    engine = fresh_engine(tmp_path / "t.jsonl")
    events = run(engine)
    engine.close()
    failed = {failure.request_id: failure.message for failure in failures(events)}
    assert set(failed) == {"greedy", "healed", "lined"}  # the requests of this seed
    assert all(message.startswith("sampling failed (RuntimeError: injected)") for message in failed.values())
    found = outputs(events)
    assert all(found[name, 0] == undisturbed[name, 0] for name in ("sampled", "grammar", "pair"))


def test_an_error_of_the_forward_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fresh_engine(tmp_path / "t.jsonl")
    engine.submit(requests()[0])

    def gone(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(engine._parts.decoder), "forward", gone)
    with pytest.raises(RuntimeError, match="the device is gone"):
        drain(engine)


def test_an_error_of_a_completed_answer_ends_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = tiny_engine(), requests()[0]
    tokens = tuple(tokens_of(run_all(engine, [request]), "greedy"))
    resume = ResumeParams(tokens, numeric_fingerprint=engine.info().numeric_fingerprint)

    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(KvCacheManager, "key_of", broken)
    engine.submit(dataclasses.replace(request, resume=resume))
    (failure,) = failures(drain(engine))
    assert failure.message.startswith("publishing failed (RuntimeError: injected)")


def test_an_error_after_a_samples_last_token_keeps_the_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping = StoppingParams(max_tokens=200, stop=("e",), ignore_eos=True)
    request = dataclasses.replace(requests()[0], sampling=SamplingParams(n=3, seed=6), stopping=stopping)
    undisturbed = run_all(tiny_engine(), [request])
    expected = [tokens_of(undisturbed, "greedy", index) for index in range(3)]
    assert len({len(tokens) for tokens in expected}) == 3  # they do not end together
    publish = KvCacheManager.publish

    def broken(kv: KvCacheManager, seq: Sequence) -> None:
        publish(kv, seq)
        if seq.ending is not None:
            raise RuntimeError("injected")

    monkeypatch.setattr(KvCacheManager, "publish", broken)
    events = run_all(tiny_engine(), [request])
    assert [tokens_of(events, "greedy", index) for index in range(3)] == expected
    assert not failures(events)
