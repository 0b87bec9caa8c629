"""Grammars through a real engine: valid output, the same with and without drafts, and refusals without a trace."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from draft.grammar import GrammarDrafter
from draft.prediction import PredictionDrafter
from specdec.core.types import (
    Failed,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.propose import GRAMMAR_BUDGET_S, Drafting
from specdec.errors import DuplicateRequestError, InvalidRequestError, QueueFullError
from specdec.grammar import compiler
from specdec.grammar.state import GrammarState
from tests.engine.tiny_engine import drain, failures, finish_of, run_all, text_of, tiny_engine, tiny_parts, tokens_of
from tests.grammar.helpers import EOS, PERSON

SCHEMA = GrammarParams(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
LOOSE = GrammarParams(
    GrammarKind.JSON_SCHEMA,
    json.dumps({k: v for k, v in PERSON.items() if k != "x-guidance"} | {"x-guidance": {"whitespace_pattern": "[ ]?"}}),
)
YES_NO = GrammarParams(GrammarKind.CHOICE, '["yes indeed", "no thanks"]')


@functools.cache
def parts() -> EngineParts:
    """The tiny engine's parts, with the drafter of grammars before the others."""
    made = tiny_parts()
    if "grammar" in made.info.drafters:
        return made
    drafters = [GrammarDrafter(), *made.drafters]
    info = dataclasses.replace(made.info, drafters=tuple(drafter.name for drafter in drafters))
    return dataclasses.replace(made, drafters=drafters, info=info)


def engine() -> Engine:
    return tiny_engine(parts())


def make_request(
    grammar: GrammarParams, name: str = "r", seed: int = 1, temperature: float = 1.0, **changes: Any
) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=seed, **changes.pop("sampling", {}))
    stopping = changes.pop("stopping", StoppingParams(max_tokens=80))
    prompt = tuple(parts().tokenizer.encode("def add(first, second):"))
    return Request(name, prompt, sampling=sampling, stopping=stopping, grammar=grammar, **changes)


def outputs(events: list[RequestEvent], name: str = "r", n: int = 1) -> list[tuple[list[int], str]]:
    return [(tokens_of(events, name, i), text_of(events, name, i)) for i in range(n)]


@pytest.mark.parametrize("grammar", [SCHEMA, LOOSE], ids=["compact", "spaced"])
def test_json_with_a_schema_always_parses(grammar: GrammarParams) -> None:
    requests = [make_request(grammar, f"r{seed}", seed, 0.0 if seed == 0 else 1.5) for seed in range(8)]
    events = run_all(engine(), requests)
    assert not failures(events)
    ended = [r.request_id for r in requests if finish_of(events, r.request_id).reason is FinishReason.EOS]
    assert len(ended) == len(requests)
    for name in ended:
        value = json.loads(text_of(events, name))
        assert set(value) == {"kind", "name", "age"}
        assert value["kind"] in ("person", "pet")
        assert 0 <= value["age"] <= 99
        assert tokens_of(events, name)[-1] == EOS


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("drafters", [("grammar",), ("suffix", "model"), ("grammar", "suffix", "model")])
def test_drafts_do_not_change_constrained_output(drafters: tuple[str, ...], temperature: float) -> None:
    changes = {"sampling": {"n": 3, "repetition_penalty": 1.1}, "temperature": temperature}
    off = SpeculationParams(mode=SpeculationMode.OFF)
    on = SpeculationParams(mode=SpeculationMode.ON, drafters=drafters, max_nodes=7)
    plain = run_all(engine(), [make_request(LOOSE, speculation=off, **changes)])
    drafted = run_all(engine(), [make_request(LOOSE, speculation=on, **changes)])
    assert outputs(plain, n=3) == outputs(drafted, n=3)
    assert [finish_of(plain, "r", i).reason for i in range(3)] == [finish_of(drafted, "r", i).reason for i in range(3)]


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_drafts_of_another_form_of_the_grammar_do_not_change_the_output(depth: int) -> None:
    forms = 'start: line+\nline: "a" WORD "=" | "b" WORD "!" | "c" WORD "?"\nWORD: /[a-z]+/'
    made = dataclasses.replace(parts(), drafters=[PredictionDrafter()])
    predicted = tuple(made.tokenizer.encode("aover=br!bdog!", add_special=False))
    ask = dataclasses.replace(
        make_request(GrammarParams(GrammarKind.EBNF, forms), seed=0, stopping=StoppingParams(max_tokens=30)),
        prediction_ids=predicted,
    )
    plain, drafted = (
        run_all(tiny_engine(made), [dataclasses.replace(ask, speculation=wish)])
        for wish in (SpeculationParams(SpeculationMode.OFF), SpeculationParams(SpeculationMode.ON, max_depth=depth))
    )
    assert finish_of(drafted, "r").stats.num_draft_tokens > 5
    assert outputs(plain) == outputs(drafted)


def test_bug_drafts_led_out_of_a_grammar_that_names_tokens() -> None:
    named = [60, 61, *[100] * 9, 62, 63, 60, 61, *[100] * 5, 64]
    grammar = GrammarParams(GrammarKind.EBNF, "start: " + " ".join(f"<[{token}]>" for token in named))
    on, ours = SpeculationParams(mode=SpeculationMode.ON, drafters=("grammar", "suffix")), engine()
    for number in range(3):
        events = run_all(ours, [make_request(grammar, f"r{number}", speculation=on)])
        assert tokens_of(events, f"r{number}", 0) == [*named, EOS]


def test_forced_text_is_accepted_whole() -> None:
    on = SpeculationParams(mode=SpeculationMode.ON, drafters=("grammar",), max_nodes=7)
    events = run_all(engine(), [make_request(SCHEMA, speculation=on)])
    stats = finish_of(events, "r").stats
    assert stats.num_draft_tokens > 10
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
    assert stats.num_steps < len(tokens_of(events, "r")) / 1.5


def test_stop_strings_min_tokens_and_ignore_eos() -> None:
    stopped = run_all(
        engine(), [make_request(YES_NO, stopping=StoppingParams(max_tokens=40, stop=(" indeed", " thanks")))]
    )
    assert text_of(stopped, "r") in ("yes", "no")
    assert finish_of(stopped, "r").reason is FinishReason.STOP_STRING
    longer = run_all(engine(), [make_request(YES_NO, stopping=StoppingParams(max_tokens=40, min_tokens=20))])
    assert text_of(longer, "r") in ("yes indeed", "no thanks")
    assert finish_of(longer, "r").reason is FinishReason.EOS
    assert len(tokens_of(longer, "r")) == 21
    endless = run_all(engine(), [make_request(YES_NO, stopping=StoppingParams(max_tokens=30, ignore_eos=True))])
    assert text_of(endless, "r") in ("yes indeed", "no thanks")
    assert finish_of(endless, "r").reason is FinishReason.LENGTH
    assert len(tokens_of(endless, "r")) == 30


def test_a_preempted_sequence_keeps_its_grammar_state() -> None:
    plain = outputs(run_all(engine(), [make_request(LOOSE)]))
    shaken = engine()
    shaken.submit(make_request(LOOSE))
    events: list[RequestEvent] = []
    for step in range(2000):
        if not shaken.has_work():
            break
        if step % 4 == 3:
            shaken.preempt_newest()
        events += shaken.step()
    assert outputs(events) == plain
    assert finish_of(events, "r").usage.preemptions > 0


def test_a_rejected_grammar_leaves_no_state() -> None:
    ours = tiny_engine(dataclasses.replace(parts(), grammars=None))
    for bad, sampling, field in (
        (GrammarParams(GrammarKind.REGEX, "(a"), {}, "grammar"),
        (GrammarParams(GrammarKind.CHOICE, "[]"), {}, "grammar"),
        (YES_NO, {"allowed_token_ids": (5,)}, "sampling.allowed_token_ids"),
    ):
        (failed,) = run_all(ours, [make_request(bad, sampling=sampling)])
        assert isinstance(failed, Failed)
        assert failed.reason == InvalidRequestError.reason
        ((named, description),) = failed.details
        assert (named, f"{named}: {description}") == (field, failed.message)
        with pytest.raises(InvalidRequestError, match=field):  # stored by the first call
            ours.submit(make_request(bad, sampling=sampling))
        assert not ours.has_work()
    assert text_of(run_all(ours, [make_request(YES_NO)]), "r") in ("yes indeed", "no thanks")


def test_a_rejected_grammar_keeps_no_request_alive() -> None:
    ours, bad = tiny_engine(dataclasses.replace(parts(), grammars=None)), GrammarParams(GrammarKind.REGEX, "(a")
    names = [f"rejected {number}" for number in range(5)]
    run_all(ours, [make_request(bad, names[0])])
    for name in names[1:]:
        with pytest.raises(InvalidRequestError):
            ours.submit(make_request(bad, name))
    gc.collect()
    alive = [each.request_id for each in gc.get_objects() if type(each) is Request]
    assert len(set(names).intersection(alive)) <= 1


@pytest.mark.parametrize("slow", ["grammar", "healing"])
def test_the_engine_steps_while_a_request_is_prepared(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream gets all of its tokens while the preparation of another request stands still."""
    gate = threading.Event()

    def wait_then(work: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any) -> Any:
            assert gate.wait(60)
            return work(*args)

        return held

    monkeypatch.setattr(compiler.CheckProcess, "check", wait_then(compiler.CheckProcess.check))
    monkeypatch.setattr(compiler, "GrammarVocabulary", wait_then(compiler.GrammarVocabulary))
    ours = tiny_engine(dataclasses.replace(parts(), grammars=None))
    stream = dataclasses.replace(
        make_request(YES_NO, "stream", stopping=StoppingParams(max_tokens=40, ignore_eos=True))
    )
    ours.submit(dataclasses.replace(stream, grammar=None))
    request = make_request(
        GrammarParams(GrammarKind.CHOICE, '["held up"]'), "held", stopping=StoppingParams(max_tokens=20)
    )
    if slow == "healing":
        request = dataclasses.replace(request, grammar=None, healing_prefix="ret")
    ours.submit(request)
    ours.submit(dataclasses.replace(request, request_id="aborted"))
    ours.submit(dataclasses.replace(request, request_id="late", deadline_s=1e-9))
    limited = dataclasses.replace(request.stopping, time_limit_s=1e-9)
    ours.submit(dataclasses.replace(request, request_id="timed", stopping=limited))
    with pytest.raises(DuplicateRequestError):
        ours.submit(request)
    events: list[RequestEvent] = []
    while not any(isinstance(event, Finished) and event.request_id == "stream" for event in events):
        events += ours.step()
    assert len(tokens_of(events, "stream")) == 40
    assert ours.has_work()
    assert ours.abort("aborted")
    assert finish_of(events, "timed").reason is FinishReason.TIME_LIMIT
    gate.set()
    events += drain(ours)
    assert finish_of(events, "aborted").reason is FinishReason.ABORTED
    assert finish_of(events, "late").reason is FinishReason.DEADLINE
    assert not failures(events)
    assert tokens_of(events, "held")
    if slow == "grammar":
        assert text_of(events, "held") == "held up"


def test_cancelled_requests_release_their_grammar_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began, check = threading.Event(), threading.Event(), compiler.CheckProcess.check

    def held(*args: Any) -> str:
        began.set()
        assert gate.wait(60)
        return check(*args)

    monkeypatch.setattr(compiler.CheckProcess, "check", held)
    monkeypatch.setattr(compiler, "MAX_PENDING_PER_KEY", 2)
    ours = tiny_engine(dataclasses.replace(parts(), grammars=None))

    def choice(number: int, name: str, **changes: Any) -> Request:
        return make_request(GrammarParams(GrammarKind.CHOICE, f'["choice {number}"]'), name, **changes)

    ours.submit(choice(0, "checked"))
    assert began.wait(60)
    ours.submit(choice(1, "stays"))
    ours.submit(choice(1, "leaves"))
    ours.submit(choice(2, "alone"))
    ours.abort("leaves")  # another request waits for its grammar
    with pytest.raises(QueueFullError, match="2 grammars of one key"):
        ours.submit(choice(3, "later"))
    ours.abort("alone")
    ours.submit(choice(3, "later", deadline_s=1e-9))
    ours.step()
    ours.submit(choice(4, "last"))
    gate.set()
    events = drain(ours)
    assert [text_of(events, name) for name in ("checked", "stays", "last")] == ["choice 0", "choice 1", "choice 4"]


def test_a_request_that_a_full_queue_refuses_leaves_no_grammar_to_compile() -> None:
    ours = tiny_engine(dataclasses.replace(parts(), grammars=None, max_queued_requests=1))
    held = [make_request(GrammarParams(GrammarKind.CHOICE, f'["choice {i}"]'), f"r{i}") for i in range(3)]
    ours.submit(held[0])
    with pytest.raises(QueueFullError):
        ours.submit(dataclasses.replace(held[0], request_id="same"))  # the first one still waits for it
    grammar = ours._preparation.waiting["r0"].prepared
    for request in held[1:]:
        with pytest.raises(QueueFullError):
            ours.submit(request)
    refused = [future for future in ours._grammars._compiled.values() if future is not grammar]
    assert refused
    assert all(future.cancelled() for future in refused)
    assert text_of(drain(ours), "r0") == "choice 0"


def test_all_grammars_of_a_step_share_one_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that take 1 ms each: drafts are truncated, and the tokens do not change."""
    now, spent, steps = [0.0], [0.0], list[float]()
    mask, lawful = GrammarState.mask, Drafting._lawful

    def slow(state: GrammarState, path: Seq[int]) -> Any:
        now[0] += 1e-3
        return mask(state, path)

    def noted(*args: Any) -> Any:
        began = now[0]
        tree = lawful(*args)
        spent[0] += now[0] - began
        return tree

    requests = [
        make_request(LOOSE, f"r{i}", seed=i, speculation=SpeculationParams(SpeculationMode.ON, max_nodes=12))
        for i in range(8)
    ]
    usual = run_all(engine(), requests)
    monkeypatch.setattr(GrammarState, "mask", slow)
    monkeypatch.setattr(Drafting, "_lawful", noted)
    drafting = functools.partial(Drafting, clock=lambda: now[0])
    ours = tiny_engine(dataclasses.replace(parts(), drafting=drafting))
    for request in requests:
        ours.submit(request)
    events: list[RequestEvent] = []
    while ours.has_work():
        events += ours.step()
        steps.append(spent[0])
        spent[0] = 0.0
    assert 0.0 < max(steps) <= GRAMMAR_BUDGET_S + len(requests) * 1e-3  # each may end its last test late
    for request in requests:
        assert outputs(events, request.request_id) == outputs(usual, request.request_id)


def test_allowed_ids_that_block_the_grammar_fail_their_request_alone() -> None:
    tokenizer = parts().tokenizer
    fork = {"allowed_token_ids": (*(t for t in range(384) if tokenizer.token_bytes(t)[:1] in (b"y", b"n")), EOS)}
    events = run_all(engine(), [make_request(YES_NO, "dead", sampling=fork), make_request(YES_NO, "live")])
    assert [failed.request_id for failed in failures(events)] == ["dead"]
    assert text_of(events, "live") in ("yes indeed", "no thanks")
