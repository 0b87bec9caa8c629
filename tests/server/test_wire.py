"""Requests and events cross the process boundary unchanged, whatever they contain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import GenerationFailedError, pack_error, unpack_error
from server.ipc import (
    Frame,
    FrameError,
    FrameReader,
    pack,
    pack_event,
    pack_frame,
    unpack,
    unpack_event,
)
from specdec.core.types import (
    Delta,
    DrafterStats,
    DrafterTrace,
    EngineInfo,
    EngineLoad,
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
    SpeculationStats,
    Started,
    StepTrace,
    StepTree,
    StoppingParams,
    TextRules,
    Timings,
    TokenLogprobs,
    Usage,
)
from specdec.errors import (
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
COUNT = st.integers(0, 2**31)
U64 = st.integers(0, 2**64 - 1)
FLOAT = st.floats(allow_nan=False)
IDS = st.lists(COUNT, max_size=5)
ID_TUPLE = st.tuples() | IDS.map(tuple)
MAYBE_COUNT = st.none() | COUNT

RULES = st.builds(
    TextRules, max_lines=MAYBE_COUNT, min_indent=MAYBE_COUNT, blank_line=st.booleans(), closers=st.none() | TEXT,
    quote=TEXT, suffix=TEXT, lead=TEXT,
)  # fmt: skip

REQUESTS = st.builds(
    Request,
    request_id=TEXT,
    prompt_ids=ID_TUPLE,
    sampling=st.builds(
        SamplingParams,
        temperature=FLOAT, top_k=COUNT, top_p=FLOAT, min_p=FLOAT, repetition_penalty=FLOAT, presence_penalty=FLOAT,
        frequency_penalty=FLOAT, logit_bias=st.lists(st.tuples(COUNT, FLOAT), max_size=3).map(tuple),
        allowed_token_ids=ID_TUPLE, seed=st.none() | U64, n=COUNT,
    ),
    stopping=st.builds(
        StoppingParams,
        max_tokens=MAYBE_COUNT, min_tokens=COUNT, stop=st.lists(TEXT, max_size=3).map(tuple), stop_token_ids=ID_TUPLE,
        include_stop=st.booleans(), ignore_eos=st.booleans(), rules=st.none() | RULES,
        time_limit_s=st.none() | FLOAT, decode_limit_s=st.none() | FLOAT, finish_line=st.booleans(),
    ),
    output=st.builds(
        OutputParams, logprobs=MAYBE_COUNT, text=st.booleans(), skip_special_tokens=st.booleans(), trees=st.booleans()
    ),
    speculation=st.builds(
        SpeculationParams,
        mode=st.sampled_from(SpeculationMode), drafters=st.none() | st.lists(TEXT, max_size=2).map(tuple),
        max_nodes=MAYBE_COUNT, max_depth=MAYBE_COUNT, width=MAYBE_COUNT,
    ),
    priority=st.integers(-(2**31), 2**31),
    deadline_s=st.none() | FLOAT,
    cache_salt=TEXT,
    prediction_ids=ID_TUPLE,
    session=TEXT,
    target_tpot_ms=st.none() | FLOAT,
    grammar=st.none() | st.builds(GrammarParams, st.sampled_from(GrammarKind), TEXT),
)  # fmt: skip

TREES = st.builds(
    StepTree, IDS, IDS, st.lists(FLOAT, max_size=3), st.lists(st.lists(TEXT, max_size=2), max_size=3), IDS, FLOAT, FLOAT
)
LOGPROBS = st.builds(TokenLogprobs, token_id=COUNT, logprob=FLOAT, top=st.lists(st.tuples(COUNT, FLOAT), max_size=3))
EVENTS = st.one_of(
    st.builds(Started, TEXT, U64, COUNT, COUNT, FLOAT, TEXT, COUNT, TEXT),
    st.builds(Delta, TEXT, COUNT, IDS, TEXT, st.lists(LOGPROBS, max_size=3), st.none() | TREES),
    st.builds(
        Finished, TEXT, COUNT, st.sampled_from(FinishReason), st.none() | TEXT | COUNT,
        st.builds(Usage, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT),
        st.builds(
            SpeculationStats, COUNT, COUNT, COUNT, COUNT, IDS,
            st.dictionaries(TEXT, st.builds(DrafterStats, COUNT, COUNT), max_size=3),
        ),
        st.builds(Timings, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT),
    ),
    st.builds(Failed, TEXT, TEXT, TEXT),
)  # fmt: skip


TRACES = st.builds(
    StepTrace, COUNT, FLOAT, COUNT, COUNT, COUNT, FLOAT, COUNT, COUNT, FLOAT, COUNT, FLOAT, FLOAT, FLOAT, FLOAT, FLOAT,
    FLOAT, FLOAT, st.lists(st.builds(DrafterTrace, TEXT, TEXT, *[COUNT] * 4, FLOAT, FLOAT, COUNT), max_size=3),
)  # fmt: skip


def _over_the_wire(value: object) -> object:
    (frame,) = FrameReader().feed(pack_frame(Frame.EVENTS, value))
    assert frame[0] == Frame.EVENTS
    return frame[1]


@given(REQUESTS)
def test_request_round_trip(request: Request) -> None:
    back = unpack(Request, _over_the_wire(request))  # type: ignore[arg-type]
    assert back == request
    assert hash(back) == hash(request)  # lists in place of tuples would not be hashable


@given(EVENTS)
def test_event_round_trip(event: RequestEvent) -> None:
    back = unpack_event(_over_the_wire(pack_event(event)))  # type: ignore[arg-type]
    assert back == event
    assert type(back) is type(event)
    if isinstance(event, Finished):
        assert isinstance(back, Finished)
        assert isinstance(back.reason, FinishReason)


@given(TRACES)
def test_trace_round_trip(step: StepTrace) -> None:
    assert unpack(StepTrace, _over_the_wire(step)) == step  # type: ignore[arg-type]


def test_nan_and_infinity_reach_the_engine_and_are_rejected_there() -> None:
    request = Request("r", (1,), SamplingParams(temperature=math.nan, top_p=math.inf))
    back = unpack(Request, _over_the_wire(pack(request)))  # type: ignore[arg-type]
    assert math.isnan(back.sampling.temperature)
    assert back.sampling.top_p == math.inf


def test_info_and_load_round_trip() -> None:
    info = EngineInfo(
        "t", None, "int8", "native", "bitwise", 100, 200, 300, 4, ("suffix", "model"), (0, 2), 2, "1.2.3", "bf16"
    )
    load = EngineLoad(1, 2, 3, 4, 5.5, 6, 7, steps_by_sequences=[8, 9], steps_by_rows=[10])
    assert unpack(EngineInfo, _over_the_wire(pack(info))) == info  # type: ignore[arg-type]
    assert unpack(EngineLoad, _over_the_wire(pack(load))) == load  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError([FieldViolation("a.b", "bad"), FieldViolation("c", "worse")]),
        PromptTooLongError(10, 12),
        QueueFullError(3, 1.25),
        DuplicateRequestError("again"),
        EngineDeadError("gone"),
    ],
)
def test_rejections_are_rebuilt_exactly(error: RequestError) -> None:
    back = unpack_error(_over_the_wire(pack_error(error)))  # type: ignore[arg-type]
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_a_rejection_with_an_unknown_reason_keeps_reason_and_message() -> None:
    back = unpack_error(_over_the_wire(pack_error(GenerationFailedError("NEW_REASON", "why"))))  # type: ignore[arg-type]
    assert (back.reason, str(back)) == ("NEW_REASON", "why")


@given(st.lists(st.tuples(TEXT, st.binary(max_size=40)), max_size=6), st.data())
def test_frames_survive_any_split(messages: list[tuple[str, bytes]], data: st.DataObject) -> None:
    stream = b"".join(pack_frame(*message) for message in messages)
    reader, got, at = FrameReader(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        got += reader.feed(stream[at : at + size])
        at += size
    assert [tuple(frame) for frame in got] == messages


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\xc1", b"\x90", b"\x05", b"\xdd\xff\xff\xff\xff"])
def test_invalid_frames_are_rejected(data: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        FrameReader().feed(data)
    assert "frame" in str(caught.value)
