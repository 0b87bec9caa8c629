"""The engine's behaviour: stops, cancels, deadlines, samples, refusals, accounting."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from ctypes import c_int64

import pytest
import torch

from draft.suffix import SuffixDrafter, SuffixReader
from specdec.control.prefill_pace import PROMPT_SIZES
from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    Started,
    StoppingParams,
)
from specdec.engine.engine import Engine
from specdec.engine.validation import MAX_REQUEST_ID_CHARACTERS
from specdec.errors import DuplicateRequestError, InvalidRequestError, PromptTooLongError, QueueFullError
from tests.draft.helpers import make_sequence
from tests.draft.native_lookups import lookups
from tests.engine.tiny_engine import drain, failures, finish_of, run_all, text_of, tiny_engine, tiny_parts, tokens_of

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(5, 45))


def request(
    name: str = "r", prompt: tuple[int, ...] = PROMPT, max_tokens: int | None = 20, **kwargs: object
) -> Request:
    kwargs.setdefault("sampling", GREEDY)
    kwargs.setdefault("stopping", StoppingParams(max_tokens=max_tokens, ignore_eos=True))
    return Request(name, prompt, **kwargs)  # type: ignore[arg-type]


def test_events_arrive_in_order_and_text_decodes_the_tokens() -> None:
    engine = tiny_engine()
    events = run_all(engine, [request(sampling=SamplingParams(temperature=1.0, seed=3))])
    kinds = [type(e) for e in events]
    assert kinds[0] is Started
    assert kinds[-1] is Finished
    assert set(kinds[1:-1]) == {Delta}
    ids = tokens_of(events, "r")
    assert len(ids) == 20
    assert text_of(events, "r") == tiny_parts().tokenizer.decode(ids)
    done = finish_of(events, "r")
    assert done.reason is FinishReason.LENGTH
    assert (done.usage.prompt_tokens, done.usage.output_tokens) == (len(PROMPT), 20)
    assert done.stats.num_accepted_draft_tokens + done.stats.num_steps == 20
    assert sum(done.stats.acceptance_histogram) == done.stats.num_spec_steps <= done.stats.num_steps


def test_speculation_off_drafts_nothing() -> None:
    events = run_all(tiny_engine(), [request(speculation=SpeculationParams(SpeculationMode.OFF))])
    stats = finish_of(events, "r").stats
    assert (stats.num_steps, stats.num_draft_tokens, stats.by_drafter) == (20, 0, {})


def test_per_request_caps_and_drafters_are_applied() -> None:
    events = run_all(
        tiny_engine(),
        [request(speculation=SpeculationParams(SpeculationMode.ON, ("model",), max_nodes=2, max_depth=1))],
    )
    stats = finish_of(events, "r").stats
    assert set(stats.by_drafter) <= {"model"}
    assert 0 < stats.num_draft_tokens <= 2 * stats.num_steps
    assert len(stats.acceptance_histogram) <= 2


def free_run() -> tuple[list[int], str]:
    events = run_all(tiny_engine(), [request(max_tokens=30)])
    return tokens_of(events, "r"), text_of(events, "r")


def drafting_engine() -> Engine:
    """An engine that drafts the text of `free_run`."""
    engine = tiny_engine(dataclasses.replace(tiny_parts(), drafters=[SuffixDrafter(lookups(), 1 << 12)]))
    run_all(engine, [request(max_tokens=30)])
    return engine


def test_a_finished_text_is_stored() -> None:
    engine = drafting_engine()
    assert not engine.has_work()
    ids, _ = free_run()
    (suffixes,) = engine._speculation.drafters
    assert isinstance(suffixes, SuffixDrafter)
    stores = suffixes._texts.stores(request())
    assert SuffixReader(lookups(), make_sequence(ids[:20]), stores).match(ids[:20], c_int64(0)) == 20


def test_a_stop_token_ends_the_sample() -> None:
    ids, _ = free_run()
    stop = ids[7]
    first = ids.index(stop)
    events = run_all(
        tiny_engine(), [request(stopping=StoppingParams(max_tokens=30, stop_token_ids=(stop,), ignore_eos=True))]
    )
    assert tokens_of(events, "r") == ids[: first + 1]
    assert text_of(events, "r") == tiny_parts().tokenizer.decode(ids[:first])
    done = finish_of(events, "r")
    assert (done.reason, done.matched_stop) == (FinishReason.STOP_TOKEN, stop)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_the_text(include: bool) -> None:
    _, text = free_run()
    clean = next(i for i in range(4, len(text) - 3) if "\ufffd" not in text[i : i + 3])
    stop = text[clean : clean + 3]
    stopping = StoppingParams(max_tokens=30, stop=(stop,), include_stop=include, ignore_eos=True)
    events = run_all(tiny_engine(), [request(stopping=stopping)])
    expected = text[: text.index(stop) + (3 if include else 0)]
    assert text_of(events, "r") == expected
    assert finish_of(events, "r").matched_stop == stop


def test_min_tokens_delays_stops() -> None:
    ids, _ = free_run()
    stopping = StoppingParams(max_tokens=30, min_tokens=12, stop_token_ids=(ids[2],), ignore_eos=True)
    events = run_all(tiny_engine(), [request(stopping=stopping)])
    out = tokens_of(events, "r")
    assert len(out) >= 12
    assert ids[2] not in out[:12]


def test_min_tokens_counts_the_tokens_before_it_in_a_tree() -> None:
    ids, _ = free_run()
    least = max(ids.index(token) for token in ids)
    stopping = StoppingParams(max_tokens=30, min_tokens=least, stop_token_ids=(ids[least],), ignore_eos=True)
    events = run_all(drafting_engine(), [request(stopping=stopping, speculation=SpeculationParams(SpeculationMode.ON))])
    assert tokens_of(events, "r") == ids[: least + 1]
    done = finish_of(events, "r")
    assert done.reason is FinishReason.STOP_TOKEN
    assert done.stats.num_steps < least / 2


def test_samples_differ_and_sample_zero_equals_the_single_one() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, n=3)
    events = run_all(tiny_engine(), [request(sampling=sampling, prompt=tuple(range(100)))])
    outs = [tuple(tokens_of(events, "r", i)) for i in range(3)]
    assert len(set(outs)) == 3
    alone = run_all(
        tiny_engine(), [request(sampling=SamplingParams(temperature=1.0, seed=11), prompt=tuple(range(100)))]
    )
    assert tuple(tokens_of(alone, "r")) == outs[0]
    assert len([e for e in events if isinstance(e, Started)]) == 1
    assert finish_of(events, "r", 1).usage.cached_tokens == 64


def test_a_random_seed_is_reported() -> None:
    events = run_all(tiny_engine(), [request(sampling=SamplingParams(temperature=1.0))])
    seed = next(e.seed for e in events if isinstance(e, Started))
    again = run_all(tiny_engine(), [request(sampling=SamplingParams(temperature=1.0, seed=seed))])
    assert tokens_of(again, "r") == tokens_of(events, "r")


def test_logprobs_are_the_models() -> None:
    events = run_all(tiny_engine(), [request(output=OutputParams(logprobs=3))])
    entries = [entry for e in events if isinstance(e, Delta) for entry in e.logprobs]
    assert [e.token_id for e in entries] == tokens_of(events, "r")
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the choice is the best
        assert entry.logprob <= 0


def test_abort_frees_pages_immediately_and_affects_no_other_request() -> None:
    engine = tiny_engine()
    alone = tokens_of(run_all(tiny_engine(), [request("b", tuple(range(50, 200)))]), "b")
    engine.submit(request("a", max_tokens=200))
    engine.submit(request("b", tuple(range(50, 200))))
    events = [e for _ in range(4) for e in engine.step()]
    assert engine.abort("a")
    assert engine.load().running_requests == 1
    assert not engine.abort("a")
    events += drain(engine)
    assert finish_of(events, "a").reason is FinishReason.ABORTED
    assert tokens_of(events, "b") == alone
    load = engine.load()
    assert load.free_pages == load.total_pages


def test_abort_while_waiting() -> None:
    engine = tiny_engine()
    engine.submit(request("a"))
    assert engine.abort("a")
    events = drain(engine)
    assert finish_of(events, "a").usage.output_tokens == 0


def test_a_passed_deadline_ends_the_request() -> None:
    engine = tiny_engine()
    engine.submit(request("late", deadline_s=1e-6))
    engine.submit(request("fine"))
    events = drain(engine)
    assert finish_of(events, "late").reason is FinishReason.DEADLINE
    assert len(tokens_of(events, "fine")) == 20


def test_a_wait_before_submission_counts_towards_the_limits() -> None:
    engine = tiny_engine()
    engine.submit(request("late", deadline_s=3.0), 9.0)
    engine.submit(request("cut", stopping=StoppingParams(max_tokens=20, time_limit_s=3.0)), 9.0)
    engine.submit(request("fine", deadline_s=3e3), 9.0)
    events = drain(engine)
    assert [finish_of(events, name).reason for name in ("late", "cut", "fine")] == [
        FinishReason.DEADLINE, FinishReason.TIME_LIMIT, FinishReason.LENGTH,
    ]  # fmt: skip
    assert finish_of(events, "fine").timings.queue_ms >= 9e3


def test_a_wait_before_submission_keeps_the_place_in_the_queue() -> None:
    engine = tiny_engine(max_batch=1)
    for name, waited_s in (("runs", 0.0), ("new", 0.0), ("held", 5.0)):
        engine.submit(request(name, max_tokens=3), waited_s)
    order = [event.request_id for event in drain(engine) if isinstance(event, Started)]
    assert order.index("held") < order.index("new")


def test_prefill_only_fills_the_cache() -> None:
    engine = tiny_engine()
    prompt = tuple(range(130))
    events = run_all(engine, [request("warm", prompt, max_tokens=0)])
    assert tokens_of(events, "warm") == []
    assert finish_of(events, "warm").reason is FinishReason.LENGTH
    events = run_all(engine, [request("use", prompt, max_tokens=3)])
    assert finish_of(events, "use").usage.cached_tokens == 129


def test_the_usage_repeats_what_the_prompt_left_out() -> None:
    usage = finish_of(run_all(tiny_engine(), [request("r", (1, 2), omitted=(1, 2, 3, 4))]), "r").usage
    found = (usage.omitted_prefix_lines, usage.omitted_suffix_lines, usage.omitted_file_lines, usage.omitted_edits)
    assert found == (1, 2, 3, 4)


def test_the_load_has_the_times_of_prompts() -> None:
    engine = tiny_engine()
    run_all(engine, [request("r", tuple(range(130)))])
    times = engine.load().prompt_ms
    assert len(times) == PROMPT_SIZES
    assert 0 < times[0] <= times[-1]
    assert list(times) == sorted(times)


def test_a_salt_separates_caches() -> None:
    engine = tiny_engine()
    prompt = tuple(range(130))
    run_all(engine, [request("a", prompt, cache_salt="one")])
    assert finish_of(run_all(engine, [request("b", prompt, cache_salt="two")]), "b").usage.cached_tokens == 0
    assert finish_of(run_all(engine, [request("c", prompt, cache_salt="one")]), "c").usage.cached_tokens == 129


def test_the_context_limit_ends_generation() -> None:
    engine = tiny_engine()
    limit = engine.info().max_context
    events = run_all(engine, [request(prompt=tuple(range(100)) * 4, max_tokens=None)])
    assert len(tokens_of(events, "r")) == limit - 400
    assert finish_of(events, "r").reason is FinishReason.LENGTH


def test_an_error_names_every_field_and_affects_no_other_request() -> None:
    engine = tiny_engine()
    engine.submit(request("ok"))
    bad = request(
        "bad",
        prompt=(1, 9999),
        sampling=SamplingParams(temperature=float("nan"), top_p=1.5, n=99, seed=-1),
        speculation=SpeculationParams(max_nodes=64, drafters=("psychic",)),
    )
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(bad)
    fields = {v.field for v in caught.value.violations}
    assert fields == {
        "prompt.token_ids", "sampling.temperature", "sampling.top_p", "sampling.n", "sampling.seed",
        "speculation.max_nodes", "speculation.drafters",
    }  # fmt: skip
    with pytest.raises(PromptTooLongError) as long:
        engine.submit(request("long", prompt=(1,) * 1000))
    assert long.value.got == 1000
    with pytest.raises(DuplicateRequestError):
        engine.submit(request("ok"))
    assert len(tokens_of(drain(engine), "ok")) == 20


def test_a_validated_request_is_not_checked_again() -> None:
    name = "n" * (MAX_REQUEST_ID_CHARACTERS + 1)
    with pytest.raises(InvalidRequestError):
        tiny_engine().submit(request(name))
    trusting = tiny_engine(dataclasses.replace(tiny_parts(), trusts_requests=True))
    assert tokens_of(run_all(trusting, [request(name)]), name) == tokens_of(run_all(tiny_engine(), [request("r")]), "r")


def test_the_queue_is_bounded() -> None:
    engine = tiny_engine(dataclasses.replace(tiny_parts(), max_queued_requests=2))
    engine.submit(request("a"))
    engine.submit(request("b"))
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request("c"))
    assert caught.value.retry_after_s > 0
    events = drain(engine)
    assert {e.request_id for e in events if isinstance(e, Finished)} == {"a", "b"}


def test_bug_a_request_whose_grammar_compiles_is_not_refused_for_later_ones() -> None:
    engine = tiny_engine(dataclasses.replace(tiny_parts(), max_queued_requests=1), max_batch=1)
    engine.submit(request("grammar", grammar=GrammarParams(GrammarKind.REGEX, "[ab]{4}")))
    prepared = engine._preparation.waiting["grammar"].prepared
    assert prepared is not None
    engine.submit(request("runs", max_tokens=8))
    events = engine.step()
    prepared.result()  # it is compiled by now, and the queue is full again
    engine.submit(request("fills the queue", max_tokens=8))
    events += drain(engine)
    assert failures(events) == []
    assert {event.request_id for event in events if isinstance(event, Finished)} == {
        "grammar", "runs", "fills the queue"
    }  # fmt: skip


def test_bug_a_prepared_request_gets_a_place_before_later_ones() -> None:
    """Others take every free place between two steps."""
    engine = tiny_engine(dataclasses.replace(tiny_parts(), max_queued_requests=1), max_batch=1)
    engine.submit(request("grammar", grammar=GrammarParams(GrammarKind.REGEX, "[ab]{5}")))
    prepared = engine._preparation.waiting["grammar"].prepared
    assert prepared is not None
    events: list[RequestEvent] = []
    numbers = itertools.count()
    for _ in range(40):
        with contextlib.suppress(QueueFullError):
            while True:
                engine.submit(request(f"{next(numbers)}", max_tokens=2))
        events += engine.step()
        prepared.result()
    assert "grammar" in {event.request_id for event in events if isinstance(event, Finished)}


def test_broken_logits_fail_their_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny_parts()
    original = parts.decoder.forward
    poison = 300

    def forward(batch: object, rows: list[int]) -> torch.Tensor:
        logits = original(batch, rows)  # type: ignore[arg-type]
        for at, row in enumerate(rows):
            if batch.tokens[row] == poison:  # type: ignore[attr-defined]
                logits[at] = float("nan")
        return logits

    monkeypatch.setattr(parts.decoder, "forward", forward)
    engine = tiny_engine(parts)
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(200)))
    events = run_all(engine, [request("bad", (1, 2, poison), sampling=sampling), request("good", sampling=sampling)])
    assert [f.request_id for f in failures(events)] == ["bad"]
    assert isinstance(failures(events)[0], Failed)
    assert len(tokens_of(events, "good")) == 20
    assert engine.load().free_pages == engine.load().total_pages


def test_reference_kernels_run_the_same_engine() -> None:
    parts = tiny_parts(kernels="reference")
    small = dataclasses.replace(parts)
    events = run_all(tiny_engine(small), [request(max_tokens=6)])
    assert len(tokens_of(events, "r")) == 6
    assert finish_of(events, "r").stats.num_steps <= 6


def test_a_crash_after_the_end_of_an_accepted_run_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decode never sees the row behind a stop token; a tree may, and must end all the same."""
    engine, (ids, _) = drafting_engine(), free_run()
    stop, original = ids[3], tiny_parts().decoder.forward

    def forward(batch: object, rows: list[int]) -> torch.Tensor:
        logits = original(batch, rows)  # type: ignore[arg-type]
        for at, row in enumerate(rows):
            if batch.tokens[row] == stop:  # type: ignore[attr-defined]
                logits[at] = float("nan")
        return logits

    monkeypatch.setattr(tiny_parts().decoder, "forward", forward)
    stopping = StoppingParams(max_tokens=30, stop_token_ids=(stop,), ignore_eos=True)
    events = run_all(engine, [request(stopping=stopping, speculation=SpeculationParams(SpeculationMode.ON))])
    assert tokens_of(events, "r") == ids[:4]
    done = finish_of(events, "r")
    assert (done.reason, done.stats.num_steps) == (FinishReason.STOP_TOKEN, 1)


def test_an_overflowing_bias_and_a_salt_that_is_not_text_are_rejected() -> None:
    engine = tiny_engine()
    with pytest.raises(InvalidRequestError, match=r"sampling\.logit_bias"):
        engine.submit(request(sampling=SamplingParams(temperature=0.0, logit_bias=((5, -1e39),))))
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        engine.submit(request(cache_salt="\ud800"))
    assert not engine.has_work()
