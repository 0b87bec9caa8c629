"""What the client sends after a stream breaks, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from server.errors import RateLimitedError
from server.grpc.errors import refuse
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc
from specdec.client import CallError, Client, RetryPolicy
from specdec.core.types import Delta, Finished, RequestEvent, SamplingParams, Started, StoppingParams, sample_seed
from specdec.errors import (
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    FingerprintMismatchError,
    InvalidRequestError,
    RequestError,
)

QUICK = RetryPolicy(attempts=2, first_s=0.01, resumes=3)
BREAK = "break"


def started(prompt_tokens: int = 3, digest: str = "a") -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        started=pb.Started(
            seed=5, prompt_tokens=prompt_tokens, numeric_fingerprint="numbers", prompt_digest=digest
        )
    )  # fmt: skip


def delta(text: str, *tokens: int, index: int = 0) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(delta=pb.Delta(index=index, token_ids=tokens, text=text))


def finished(index: int = 0) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(finished=pb.Finished(index=index, finish_reason=4))


class Script(generation_pb2_grpc.GenerationServiceServicer):
    """Answers each call with the next of ``answers``, or with the answer that the request selects."""

    def __init__(self, *answers: list[Any] | Callable[[Any], list[Any]]) -> None:
        self._answers = list(answers)
        self.asked: list[pb.GenerateStreamRequest] = []

    async def GenerateStream(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        answer = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(request)
        for item in answer(request) if callable(answer) else answer:
            if item == BREAK:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            elif isinstance(item, RequestError):
                await refuse(context, item)
            else:
                await context.write(item)


@asynccontextmanager
async def talking(script: Script, retry: RetryPolicy = QUICK, before: str = "") -> AsyncIterator[Client]:
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with Client(f"{before}127.0.0.1:{port}", retry=retry) as client:
            yield client
    finally:
        await server.stop(0)


BROKEN = [started(), delta("ab", 1, 2), delta("", 3), BREAK]
REST = [started(), delta("cd", 4), finished()]


async def gather(client: Client, seen: list[RequestEvent] | None = None, **options: Any) -> list[RequestEvent]:
    seen = [] if seen is None else seen
    async for event in client.stream([7, 8, 9], request_id="r", **options):
        seen.append(event)
    return seen


async def test_resuming_sends_the_received_tokens_and_yields_nothing_twice() -> None:
    script = Script(BROKEN, [started(), delta("c", 4), BREAK], REST)
    async with talking(script) as client:
        events = await gather(client, stopping=StoppingParams(max_tokens=9, time_limit_s=60.0, decode_limit_s=40.0))
    assert [type(event) for event in events] == [Started, *[Delta] * 4, Finished]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "abccd"
    first, second, third = script.asked
    assert not first.HasField("resume")
    assert (list(second.resume.token_ids), second.resume.text_characters) == ([1, 2, 3], 2)
    assert (list(third.resume.token_ids), third.resume.text_characters) == ([1, 2, 3, 4], 3)
    assert (second.sampling.seed, second.resume.numeric_fingerprint) == (5, "numbers")
    assert first.stopping.time_limit_ms > second.stopping.time_limit_ms > third.stopping.time_limit_ms > 50e3
    decoding = [asked.stopping.decode_time_limit_ms for asked in script.asked]
    assert decoding[0] > decoding[1] > decoding[2] > 30e3


async def test_samples_that_no_server_accepts_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.client.resuming._Received", lambda index: pytest.fail("it keeps one"))
    async with talking(Script([InvalidRequestError([FieldViolation("sampling.n", "must lie in 1..16")])])) as client:
        with pytest.raises(CallError, match=r"sampling\.n"):
            await gather(client, sampling=SamplingParams(n=4_000_000_000))


async def test_a_stream_that_stops_two_engines_ends() -> None:
    shut = [started(), EngineDeadError("the server shut down")]
    script = Script([started(), delta("a", 1), EngineDeadError()], shut, [started(), EngineDeadError()], REST)
    async with talking(script) as client:
        with pytest.raises(CallError, match="the engine process stopped"):
            await gather(client)
    assert len(script.asked) == 3


async def test_a_stream_survives_engines_that_others_stop() -> None:
    script = Script(*([started(), delta("a", token), EngineDeadError()] for token in range(1, 6)), REST)
    async with talking(script) as client:
        events = await gather(client)
    assert isinstance(events[-1], Finished)


async def test_several_samples_resume_independently() -> None:
    def rest(request: pb.GenerateStreamRequest) -> list[Any]:
        return [started(), delta("x", 9), finished()]

    broken = [started(), delta("a", 1), delta("b", 2, index=1), delta("c", 3, index=2), finished(1), BREAK]
    script = Script(broken, rest)
    async with talking(script) as client:
        events = await gather(client, sampling=SamplingParams(n=3, seed=5))
    texts = {index: "".join(e.text for e in events if isinstance(e, Delta) and e.index == index) for index in range(3)}
    assert texts == {0: "ax", 1: "b", 2: "cx"}
    resumed = {(request.sampling.seed, request.sampling.n, *request.resume.token_ids) for request in script.asked[1:]}
    assert resumed == {(5, 1, 1), (sample_seed(5, 2), 1, 3)}
    assert sorted(event.index for event in events if isinstance(event, Finished)) == [0, 1, 2]


async def test_samples_resume_at_once_so_that_each_has_the_time_that_is_left() -> None:
    class Slow(Script):
        async def GenerateStream(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            await asyncio.sleep(0.6 if self.asked else 0.0)
            await super().GenerateStream(request, context)

    async with talking(Slow([started(), BREAK], [started(), delta("x", 9), finished()])) as client:
        events = await gather(client, sampling=SamplingParams(n=4, seed=5), timeout_s=2.0)
    assert sorted(event.index for event in events if isinstance(event, Finished)) == [0, 1, 2, 3]


async def test_calls_of_many_samples_do_not_interfere() -> None:
    def rest(request: pb.GenerateStreamRequest) -> list[Any]:
        if sum(resumed.request_id == request.request_id for resumed in script.asked) > 1:
            return [DuplicateRequestError("it is in flight; choose another")]
        return [started(), delta("x", 9), finished()]

    script = Script([started(), BREAK], rest)
    async with talking(script) as client:
        events = await gather(client, sampling=SamplingParams(n=16, seed=5), supersedes_key="editor")
    assert sum(isinstance(event, Finished) for event in events) == 16
    keys = [request.scheduling.supersedes_key for request in script.asked[1:] if request.sampling.seed != 5]
    assert set(keys) == {""}  # a call with the key would end the one that has it
    assert {request.scheduling.supersedes_key for request in script.asked if request.sampling.seed == 5} == {"editor"}


@pytest.mark.parametrize(("queued_s", "ending_s"), [(0.5, 0.0), (0.0, 0.5)])
async def test_samples_resume_one_after_the_other_where_the_key_allows_one_call(
    queued_s: float, ending_s: float
) -> None:
    class OneCall(Script):
        """Takes one call at a time."""

        running = False

        async def GenerateStream(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
            if self.running:
                await refuse(context, RateLimitedError("key", "max_concurrent", 1, 0.01))
            self.running = True
            try:
                await asyncio.sleep(queued_s if len(self.asked) else 0.0)
                await super().GenerateStream(request, context)
                await asyncio.sleep(ending_s)
            finally:
                self.running = False

    async with talking(OneCall([started(), BREAK], [started(), delta("x", 9), finished()])) as client:
        events = await gather(client, sampling=SamplingParams(n=3, seed=5))
    assert sorted(event.index for event in events if isinstance(event, Finished)) == [0, 1, 2]


async def test_samples_give_up_where_others_hold_the_places_of_the_key() -> None:
    script = Script([started(), BREAK], [RateLimitedError("key", "max_concurrent", 1, 0.01)])
    async with talking(script) as client, asyncio.timeout(5):
        with pytest.raises(CallError) as caught:
            await gather(client, sampling=SamplingParams(n=3, seed=5))
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_only_the_end_of_the_call_is_missing() -> None:
    script = Script([started(), delta("ab", 1, 2), finished(), BREAK])
    async with talking(script) as client:
        events = await gather(client)
    assert isinstance(events[-1], Finished)
    assert len(script.asked) == 1


async def test_the_former_call_is_still_in_flight() -> None:
    script = Script(BROKEN, [DuplicateRequestError("request_id 'r' is in flight; choose another")], REST)
    async with talking(script) as client:
        await gather(client)
    assert [request.request_id for request in script.asked] == ["r", "r", "r~"]


async def test_the_first_call_was_lost_before_its_answer_and_is_still_in_flight() -> None:
    script = Script([BREAK], [DuplicateRequestError("request_id 'r' is in flight; choose another")], REST)
    async with talking(script) as client:
        events = await gather(client)
    assert [type(event) for event in events] == [Started, Delta, Finished]
    assert [request.request_id for request in script.asked] == ["r", "r", "r~"]


async def test_an_id_of_another_call_is_rejected() -> None:
    script = Script([DuplicateRequestError("request_id 'r' is in flight; choose another")])
    async with talking(script) as client:
        with pytest.raises(CallError, match="choose another"):
            await gather(client)
    assert len(script.asked) == 1


async def test_the_next_address_continues() -> None:
    script = Script(BROKEN, REST)
    async with talking(script, before="127.0.0.1:1, ") as client:
        assert isinstance((await gather(client))[-1], Finished)


async def test_a_server_with_other_numbers_is_passed_over() -> None:
    refused = FingerprintMismatchError.between("numbers", "others")
    first, second, third = Script(BROKEN, [BREAK]), Script([refused]), Script(REST)
    async with talking(third) as at_third, talking(second) as at_second:
        behind = f"{at_second._connection.address},{at_third._connection.address}"
        async with (
            talking(first) as at_first,
            Client(f"{at_first._connection.address},{behind}", retry=QUICK) as client,
        ):
            assert isinstance((await gather(client))[-1], Finished)
    assert len(second.asked) == len(third.asked) == 1


async def test_a_stream_waits_for_a_server_that_is_down_while_another_has_other_numbers() -> None:
    other = Script([FingerprintMismatchError.between("numbers", "others")])
    first = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Script(BROKEN), first)
    down = f"127.0.0.1:{first.add_insecure_port('127.0.0.1:0')}"
    await first.start()
    async with (
        asyncio.timeout(5),
        talking(other) as at_other,
        Client(f"{down},{at_other._connection.address}", retry=QUICK) as client,
        aclosing(client.stream([7, 8, 9], request_id="r")) as events,
    ):
        await anext(events)
        await first.stop(0)
        with pytest.raises(CallError, match="others") as caught:
            _ = [event async for event in events]
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, FingerprintMismatchError.reason)
    assert len(other.asked) == QUICK.resumes


async def test_one_try_after_each_progress() -> None:
    script = Script(BROKEN, [started(), delta("c", 4), BREAK], REST)
    async with talking(script, RetryPolicy(first_s=0.01, resumes=1)) as client:
        assert isinstance((await gather(client))[-1], Finished)


@pytest.mark.parametrize(
    ("answer", "retry", "code", "calls"),
    [
        ([FingerprintMismatchError.between("numbers", "others")], QUICK, grpc.StatusCode.FAILED_PRECONDITION, 2),
        ([started(4), delta("x", 4)], QUICK, grpc.StatusCode.FAILED_PRECONDITION, 2),
        ([started(3, "b"), delta("x", 4)], QUICK, grpc.StatusCode.FAILED_PRECONDITION, 2),
        ([started(), BREAK], QUICK, grpc.StatusCode.UNAVAILABLE, 4),
        ([BREAK], QUICK, grpc.StatusCode.UNAVAILABLE, 4),
        (REST, RetryPolicy(resumes=0), grpc.StatusCode.UNAVAILABLE, 1),
        ([BREAK], RetryPolicy(first_s=0.01, resumes=1), grpc.StatusCode.UNAVAILABLE, 2),
    ],
    ids=["other numbers", "other prompt", "other date", "no progress", "no start", "not asked to", "one try"],
)
async def test_resuming_gives_up(answer: list[Any], retry: RetryPolicy, code: grpc.StatusCode, calls: int) -> None:
    script, seen = Script(BROKEN, answer), list[RequestEvent]()
    async with talking(script, retry) as client:
        with pytest.raises(CallError) as caught:
            await gather(client, seen)
    assert caught.value.code == code
    assert len(script.asked) == calls
    assert [type(event) for event in seen] == [Started, Delta, Delta]
