"""The draft model is swapped while requests run: no token changes, and nothing of the old one remains."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import weakref
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.cross_vocab import CrossVocabularyDrafter
from draft.head import HeadDrafter
from draft.model import ModelDrafter
from specdec.control.trace import KEPT_FILES, read_trace, replay_file
from specdec.core.types import (
    Delta,
    Request,
    RequestEvent,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.memory import measure_draft
from specdec.errors import ConfigError, InvalidRequestError, ModelError
from specdec.models.catalogue import CATALOGUE
from tests.core.kv_cache.invariants import check_pages
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.draft.tiny_drafts import folders
from tests.engine.test_every_drafter import every_parts
from tests.engine.test_path_identity import named, prompts, samplings, stoppings
from tests.engine.tiny_engine import drain, finish_of, run_all, tiny_engine, tiny_parts, tokens_of
from tests.models.tiny import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
LONG = StoppingParams(max_tokens=60, ignore_eos=True)
FORCED = SpeculationParams(SpeculationMode.ON)
PROMPT = tuple(range(10, 110))


@functools.cache
def drafts() -> dict[str, str]:
    """Folders of draft models: one of the target's vocabulary, one of another."""
    folder = Path(tiny_parts().config.target).parent / "second"
    found = {"same": str(make_tiny_model("llama", folder, seed=9)), "other": str(folders()["other"])}
    width = json.loads((Path(tiny_parts().config.target) / "config.json").read_text())["hidden_size"]
    vocab = tiny_parts().info.vocab_size
    shape = head_config(vocab, 200, eagle_aux_hidden_state_layer_ids=[1, 0, 1], specdec={"acceptance": [0.5, 0.25]})
    found["head"] = str(write_head(folder.parent / "next head", shape, head_tensors(width, vocab, 200, seed=8)))
    return found


def swap(engine: Engine, kind: str | None) -> None:
    engine.swap_draft(None if kind is None else engine.load_draft(drafts()[kind], None))


def run_swapping(
    engine: Engine, requests: Seq[Request], swaps: dict[int, str | None], late: Request | None = None
) -> list[RequestEvent]:
    """All events; before step k the draft becomes ``swaps[k]``. ``late`` comes right after the first swap."""
    for request in requests:
        engine.submit(request)
    events: list[RequestEvent] = []
    for step in range(5000):
        if not engine.has_work():
            return events
        if step in swaps:
            swap(engine, swaps[step])
            if late is not None and step == min(swaps):
                engine.submit(late)
        events += engine.step()
        check_pages(engine._kv)
    raise AssertionError("still busy")


def answers(events: Seq[RequestEvent]) -> dict[tuple[str, int], tuple[list[object], str]]:
    """Per sample its tokens with their log-probabilities, and its text."""
    found: dict[tuple[str, int], tuple[list[object], str]] = {}
    for event in events:
        if isinstance(event, Delta):
            rows, text = found.get((event.request_id, event.index), ([], ""))
            rows += [*event.token_ids, *((p.token_id, p.logprob) for p in event.logprobs)]
            found[event.request_id, event.index] = (rows, text + event.text)
    return found


requests = st.builds(
    Request,
    request_id=st.just(""),
    prompt_ids=prompts(),
    sampling=samplings,
    stopping=stoppings,
    speculation=st.builds(
        SpeculationParams,
        mode=st.sampled_from(SpeculationMode),
        drafters=st.sampled_from([None, ("suffix",), ("model",), ("suffix", "model")]),
    ),
    prediction_ids=st.lists(st.integers(0, 379), max_size=20).map(tuple),
    session=st.sampled_from(["", "s"]),
)


def seeded(drawn: Seq[Request]) -> list[Request]:
    """With ids, and with seeds, since two runs are compared."""
    return [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=r.sampling.seed or 5))
        for r in named(list(drawn))
    ]


@settings(max_examples=25)
@given(
    drawn=st.lists(requests, min_size=1, max_size=4),
    swaps=st.dictionaries(st.integers(0, 25), st.sampled_from([None, "same", "other"]), max_size=3),
    pages=st.sampled_from([None, 9]),
)
def test_swaps_change_no_token(drawn: list[Request], swaps: dict[int, str | None], pages: int | None) -> None:
    wanted = seeded(drawn)
    plain = [dataclasses.replace(r, speculation=SpeculationParams(SpeculationMode.OFF)) for r in wanted]
    expected = answers(run_all(tiny_engine(), plain))
    assert answers(run_swapping(tiny_engine(pages=pages), wanted, swaps)) == expected


@settings(max_examples=10)
@given(
    drawn=st.lists(requests, min_size=1, max_size=3),
    swaps=st.dictionaries(st.integers(0, 25), st.sampled_from([None, "same", "other", "head"]), min_size=1, max_size=2),
)
def test_swaps_with_every_other_drafter_change_no_token(drawn: list[Request], swaps: dict[int, str | None]) -> None:
    wanted = [dataclasses.replace(r, speculation=dataclasses.replace(r.speculation, drafters=None)) for r in drawn]
    wanted = seeded(wanted)
    plain = [dataclasses.replace(r, speculation=SpeculationParams(SpeculationMode.OFF)) for r in wanted]
    expected = answers(run_all(tiny_engine(), plain))
    assert answers(run_swapping(tiny_engine(every_parts()), wanted, swaps)) == expected


@pytest.mark.parametrize(("kind", "drafter"), [("same", ModelDrafter), ("other", CrossVocabularyDrafter)])
def test_the_new_model_drafts_for_running_and_new_requests(kind: str, drafter: type) -> None:
    engine = tiny_engine()
    ask = Request("old", PROMPT, GREEDY, LONG, speculation=FORCED)
    swap(engine, None)
    engine.submit(ask)
    events = [event for _ in range(8) for event in engine.step()]
    assert engine.info().draft is None
    swap(engine, kind)
    (model,) = [d for d in engine._speculation.drafters if d.name == "model"]
    assert isinstance(model, drafter)
    assert engine.info().draft == Path(drafts()[kind]).name
    assert engine.info().drafters == ("suffix", "model")
    engine.submit(dataclasses.replace(ask, request_id="new"))
    events += drain(engine)
    for request_id in ("old", "new"):
        assert finish_of(events, request_id).stats.by_drafter["model"].num_draft_tokens > 0


def test_a_head_replaces_a_head_and_the_draft_model_stays() -> None:
    engine = tiny_engine(every_parts())
    before = engine.info()
    ask = Request("old", PROMPT, GREEDY, LONG, speculation=dataclasses.replace(FORCED, drafters=("head",)))
    engine.submit(ask)
    events = [event for _ in range(8) for event in engine.step()]
    (old,) = [d for d in engine._speculation.drafters if d.name == "head"]
    swap(engine, "head")
    assert all(d is not old for d in engine._speculation.drafters)
    info = engine.info()
    assert (info.head, info.head_acceptance, info.draft) == (drafts()["head"], (0.5, 0.25), before.draft)
    assert set(info.drafters) == set(before.drafters)
    events += [*engine.step(), *run_all(engine, [dataclasses.replace(ask, request_id="new")])]
    for request_id in ("old", "new"):
        assert finish_of(events, request_id).stats.by_drafter["head"].proposed_at[0] > 0


def test_drafters_that_stay_keep_what_they_have_read() -> None:
    engine = tiny_engine(every_parts())
    ask = Request("a", PROMPT, GREEDY, LONG, speculation=dataclasses.replace(FORCED, drafters=("model", "head")))
    engine.submit(ask)
    for _ in range(4):
        engine.step()
    (sequence,) = engine._requests.sequences()
    read = sequence.draft_computed
    assert read >= len(PROMPT)
    swap(engine, "head")
    assert sequence.draft_computed == read
    (head,) = [d for d in engine._speculation.drafters if isinstance(d, HeadDrafter)]
    for _ in range(4):
        engine.step()
    known = head._contexts[sequence].known
    assert known > 0
    swap(engine, "same")
    assert sequence.draft_computed == 0
    assert head._contexts[sequence].known == known


def test_a_head_is_no_draft_model() -> None:
    parts = tiny_parts()
    config = parts.config.model_copy(update={"draft": drafts()["head"]})
    with pytest.raises(ConfigError, match=r"is a feature head; name it as engine\.draft_head"):
        measure_draft(config, parts.decoder.config, None)


def test_auto_names_the_catalogues_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tiny_parts()
    entry = dataclasses.replace(CATALOGUE["smollm2-135m"], drafts=(drafts()["same"],))
    monkeypatch.setitem(CATALOGUE, parts.config.target, entry)
    engine = tiny_engine()
    engine.swap_draft(engine.load_draft("auto", None))
    assert engine.info().draft == Path(drafts()["same"]).name


def test_a_head_whose_states_the_target_does_not_keep_needs_a_restart() -> None:
    engine = tiny_engine()
    before, drafters = engine.info(), engine._speculation.drafters
    with pytest.raises(ConfigError, match="keeps none; set it to this head and restart"):
        swap(engine, "head")
    assert (engine.info(), engine._speculation.drafters) == (before, drafters)


def test_a_removed_drafter_is_unknown() -> None:
    engine = tiny_engine()
    named_it = Request("r", PROMPT, GREEDY, LONG, speculation=SpeculationParams(SpeculationMode.ON, ("model",)))
    engine.submit(named_it)
    for _ in range(6):
        engine.step()
    swap(engine, None)
    events = drain(engine)  # a request that named it before continues without it
    assert len(tokens_of(events, "r")) > 0
    with pytest.raises(InvalidRequestError, match="unknown model"):
        engine.submit(dataclasses.replace(named_it, request_id="s"))
    swap(engine, "same")
    engine.submit(dataclasses.replace(named_it, request_id="t"))
    assert finish_of(drain(engine), "t").stats.num_draft_tokens > 0


def test_the_new_model_prefills_the_text_itself() -> None:
    """A twin of the target drafts what follows, unless it uses the old model's keys."""
    engine = tiny_engine()
    chain = SpeculationParams(SpeculationMode.ON, ("model",), max_nodes=4, max_depth=4, width=1)
    ask = Request("a", PROMPT, GREEDY, LONG, speculation=chain)
    run_all(engine, [dataclasses.replace(ask, request_id="before")])  # leaves the old model's keys in the cache
    engine.submit(dataclasses.replace(ask, request_id="running", prompt_ids=PROMPT[::-1]))
    for _ in range(6):
        engine.step()
    ((sequence,),) = engine._requests.live.values()
    drafted, accepted = sequence.stats.num_draft_tokens, sequence.stats.num_accepted_draft_tokens
    assert drafted > accepted + 4  # the old one is bad at it
    engine.swap_draft(engine.load_draft(tiny_parts().config.target, "int8"))
    engine.submit(ask)
    events = drain(engine)
    stats = finish_of(events, "running").stats
    assert stats.num_draft_tokens > drafted
    assert stats.num_draft_tokens - drafted == stats.num_accepted_draft_tokens - accepted
    hit = finish_of(events, "a")
    assert hit.usage.cached_tokens > 0  # the target's keys are still good
    assert 0 < hit.stats.num_draft_tokens == hit.stats.num_accepted_draft_tokens


@pytest.mark.parametrize(("first", "kind"), [("same", None), ("same", "same"), ("same", "other"), ("other", None)])
def test_the_old_models_memory_is_free_on_return(first: str, kind: str | None) -> None:
    engine = tiny_engine()
    swap(engine, first)
    engine.submit(Request("r", PROMPT, GREEDY, LONG, speculation=FORCED))
    for _ in range(6):
        engine.step()
    (old,) = [d for d in engine._speculation.drafters if d.name == "model"]
    assert isinstance(old, ModelDrafter | CrossVocabularyDrafter)
    decoder: Any = old._decoder
    held = [weakref.ref(part) for part in (old, decoder, decoder.pool, decoder._x)]
    del old, decoder
    gc.disable()
    try:
        swap(engine, kind)
        assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()
    drain(engine)


def test_the_memory_of_the_model_that_the_engine_began_with_is_free_too() -> None:
    base = tiny_parts()
    assert base.load_draft is not None
    engine = tiny_engine(dataclasses.replace(base, drafters=[base.load_draft(drafts()["same"], None)[1]]))
    held = weakref.ref(engine._speculation.drafters[0])
    gc.disable()
    try:
        swap(engine, None)
        assert held() is None
    finally:
        gc.enable()


def test_a_failed_load_keeps_the_old_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    before, drafters = engine.info(), engine._speculation.drafters
    with pytest.raises(ModelError, match="nowhere"):
        engine.load_draft("./nowhere", None)
    monkeypatch.setattr("specdec.engine.platform.available_bytes", lambda: 1 << 20)
    with pytest.raises(ModelError, match="kv_tokens"):  # memory is looked at before it is taken
        engine.load_draft(drafts()["same"], None)
    assert (engine.info(), engine._speculation.drafters) == (before, drafters)


def test_an_engine_without_speculation_accepts_no_draft() -> None:
    base = tiny_parts()
    off = base.config.speculation.model_copy(update={"enabled": False})
    engine = tiny_engine(dataclasses.replace(base, drafters=[]), speculation=off)
    with pytest.raises(ConfigError, match="without speculation"):
        engine.load_draft(drafts()["same"], None)
    with pytest.raises(ConfigError, match="without speculation"):
        engine.swap_draft(None)
    fixed = Engine(dataclasses.replace(base, load_draft=None))
    with pytest.raises(ConfigError):
        fixed.swap_draft(None)


def traced(path: Path) -> EngineParts:
    base = tiny_parts()
    speculation = base.config.speculation.model_copy(update={"trace_file": path})
    return dataclasses.replace(base, config=base.config.model_copy(update={"speculation": speculation}))


def test_each_controller_has_a_trace_that_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    slow = SpeculationParams(max_nodes=1)
    plain = SpeculationParams(SpeculationMode.OFF)  # takes part in every step's decisions
    asks = [Request("off", PROMPT[:10], SamplingParams(seed=9), LONG, speculation=plain)]
    asks += [Request(f"r{i}", PROMPT, SamplingParams(seed=i), LONG, speculation=slow) for i in range(3)]
    engine = tiny_engine(traced(path))
    expected = answers(run_all(tiny_engine(), asks))
    assert answers(run_swapping(engine, asks[:3], {12: "same", 24: None}, asks[3])) == expected
    engine.close()
    for name in ("trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"):
        report = replay_file(tmp_path / name)
        assert (report.steps > 3, report.differences) == (True, [])
        records = [cast(dict[str, Any], step.replay) for step in read_trace(tmp_path / name)[1]]
        assert all(len({one["history"][0] for one in r["sequences"]}) == len(r["sequences"]) for r in records if r)


def test_the_trace_files_of_many_swaps_are_bounded(tmp_path: Path) -> None:
    engine = tiny_engine(traced(tmp_path / "trace"))
    for number in range(KEPT_FILES + 2):
        run_all(engine, [Request(f"r{number}", PROMPT, GREEDY, LONG)])
        engine.swap_draft(None)
    engine.close()
    assert len(list(tmp_path.iterdir())) == KEPT_FILES + 1


def test_a_swap_keeps_the_steps_in_memory_and_their_numbers(tmp_path: Path) -> None:
    engine = tiny_engine(traced(tmp_path / "trace.jsonl"))
    run_all(engine, [Request("a", PROMPT, GREEDY, LONG)])
    before = engine.trace(1000)
    engine.swap_draft(None)
    run_all(engine, [Request("b", PROMPT, GREEDY, LONG)])
    after = engine.trace(1000)
    assert after[: len(before)] == before
    assert [step.step for step in after] == list(range(len(after)))
    engine.close()


def test_an_unwritable_trace_file_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    engine = tiny_engine(traced(folder / "trace.jsonl"))
    before = engine.info()
    (folder / "trace.jsonl").unlink()
    (folder / "trace.jsonl").mkdir()
    with pytest.raises(ConfigError, match="trace_file"):
        engine.swap_draft(None)
    assert engine.info() == before
    ask = Request("r", PROMPT, GREEDY, LONG, speculation=FORCED)
    assert "model" in finish_of(run_all(engine, [ask]), "r").stats.by_drafter


def test_flushing_frees_what_no_request_uses() -> None:
    engine = tiny_engine()
    ask = Request("a", PROMPT, GREEDY, StoppingParams(max_tokens=3, ignore_eos=True))
    run_all(engine, [ask])
    running = Request("b", tuple(reversed(PROMPT)), GREEDY, LONG)
    engine.submit(running)
    events = [event for _ in range(4) for event in engine.step()]
    assert engine.flush_cache() == 2  # of `a`, the one full page and the one in part
    events += drain(engine)
    assert tokens_of(events, "b") == tokens_of(run_all(tiny_engine(), [running]), "b")
    again = finish_of(run_all(engine, [dataclasses.replace(ask, request_id="c")]), "c")
    assert again.usage.cached_tokens == 0
