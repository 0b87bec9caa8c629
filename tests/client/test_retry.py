"""When a call is tried again: by the server's word, within the deadline, never after the first event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from server.errors import DrainingError, PoisonRequestError, UnknownModelError
from server.grpc.errors import refuse
from specdec.api.v1 import generation_pb2
from specdec.cli.options import CONNECT_S
from specdec.client.connection import CallError, Connection, Credentials, RetryPolicy
from specdec.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    FieldViolation,
    InvalidRequestError,
    QueueFullError,
    RequestError,
)

QUICK = RetryPolicy(first_s=0.01)
CODES = st.sampled_from(list(grpc.StatusCode))


def full(seconds: float = 0.05) -> QueueFullError:
    return QueueFullError(1, seconds)


class Script:
    """A server that rejects calls with ``errors``, one each, and answers the next. "late" stands for a break after the
    first message, "reset" for the status that gRPC returns when a proxy resets a stream. ``times``: when calls arrived;
    ``left``: their remaining time."""

    def __init__(self, *errors: RequestError | grpc.StatusCode | str) -> None:
        self.errors, self.times, self.left = list(errors), list[float](), list[float | None]()
        self.metadata: list[dict[str, Any]] = []
        self.asked = list[bytes]()  # of unary calls

    async def unary(self, request: bytes, context: Any) -> bytes:
        self.asked.append(request)
        await self._next(context)
        return b"answer"

    async def stream(self, request: bytes, context: Any) -> None:
        late = self.errors[0] == "late" if self.errors else False
        if late:
            await context.write(b"first")
        await self._next(context)
        await context.write(b"answer")

    async def _next(self, context: Any) -> None:
        self.times.append(time.monotonic())
        self.left.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        error = self.errors.pop(0) if self.errors else None
        if isinstance(error, RequestError):
            await refuse(context, error)
        elif error == "reset":
            await context.abort(grpc.StatusCode.INTERNAL, "Stream removed (RST_STREAM, error code 2)")
        elif error is not None:
            code = error if isinstance(error, grpc.StatusCode) else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, "bare")


@asynccontextmanager
async def talking(
    script: Script,
    retry: RetryPolicy = QUICK,
    credentials: Credentials = Credentials(),  # noqa: B008
    workspace: str = "",
) -> AsyncIterator[tuple[Connection, Any, Any]]:
    """A connection, and its two methods."""
    server = grpc.aio.server()
    handlers = {
        "U": grpc.unary_unary_rpc_method_handler(script.unary),
        "S": grpc.unary_stream_rpc_method_handler(script.stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = Connection([f"127.0.0.1:{port}"], credentials, retry, workspace)
    try:
        yield connection, lambda at: at.unary_unary("/a.B/U"), lambda at: at.unary_stream("/a.B/S")
    finally:
        await connection.close()
        await server.stop(0)


async def failure(call: Any) -> CallError:
    with pytest.raises(CallError) as caught:
        await call
    return caught.value


async def whole(connection: Connection, method: Any, timeout_s: float | None = None) -> list[bytes]:
    async with aclosing(connection.stream(method, b"", timeout_s)) as messages:
        return [message async for message in messages]


@pytest.mark.parametrize(
    "errors",
    [(), (full(),), (full(), full()), (DrainingError(), full()), (grpc.StatusCode.UNAVAILABLE,)],
)
async def test_retryable_errors_are_retried(errors: Sequence[Any]) -> None:
    for stream in (False, True):
        script = Script(*errors)
        async with talking(script, RetryPolicy(first_s=0.01, longest_s=2)) as (connection, unary, streaming):
            if stream:
                assert await whole(connection, streaming) == [b"answer"]
            else:
                assert await connection.unary(unary, b"") == b"answer"
        assert len(script.times) == len(errors) + 1
        for error, before, after in zip(errors, script.times, script.times[1:], strict=False):
            hint = getattr(error, "retry_after_s", 1.0 if isinstance(error, DrainingError) else 0.0)
            assert after - before >= hint - 0.002


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidRequestError([FieldViolation("a.b", "is bad")]), "INVALID_ARGUMENT"),
        (UnknownModelError("x", "y"), "MODEL_NOT_FOUND"),
        (PoisonRequestError(), "STOPPED_ENGINE_TWICE"),
        (full(3600), "QUEUE_FULL"),  # longer than any deadline
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ""),  # without a hint: too large a message
        (grpc.StatusCode.INTERNAL, ""),
        (grpc.StatusCode.ABORTED, ""),
    ],
)
async def test_other_errors_are_raised_immediately_with_all_details(error: Any, reason: str) -> None:
    script = Script(error, error)
    async with talking(script) as (connection, unary, streaming):
        raised = await failure(connection.unary(unary, b""))
        assert len(script.times) == 1
        same = await failure(whole(connection, streaming))
    assert (raised.reason, raised.reached, str(same)) == (reason, True, str(raised))
    if isinstance(error, InvalidRequestError):
        assert (raised.violations, "a.b: is bad" in str(raised)) == ((FieldViolation("a.b", "is bad"),), True)
    if isinstance(error, QueueFullError):
        assert (raised.retry_after_s, raised.metadata["limit"]) == (3600, "1")


async def test_a_request_that_stops_two_engines_is_not_sent_to_a_third() -> None:
    errors = (EngineDeadError(), EngineDeadError("the engine is restarting"), EngineDeadError())
    for stream in (False, True):
        script = Script(*errors, *errors)
        async with talking(script, RetryPolicy(attempts=9, longest_s=9)) as (connection, unary, streaming):
            raised = await failure(whole(connection, streaming) if stream else connection.unary(unary, b""))
        assert (raised.reason, raised.engines_stopped, len(script.times)) == ("ENGINE_UNAVAILABLE", 2, 3)


async def test_the_number_of_retries_is_limited() -> None:
    script = Script(*[full(0.01)] * 9)
    async with talking(script, RetryPolicy(attempts=3)) as (connection, unary, _):
        assert (await failure(connection.unary(unary, b""))).reason == "QUEUE_FULL"
    assert len(script.times) == 3


async def test_the_deadline_covers_all_tries_and_the_server_gets_the_remainder() -> None:
    script = Script(full(0.1), full(0.1))
    async with talking(script) as (connection, unary, _):
        await connection.unary(unary, b"", 5.0)
        lefts = [left for left in script.left if left is not None]
        assert len(lefts) == 3
        assert lefts[0] - lefts[2] >= 0.1  # two pauses of 0.1 s; gRPC rounds the deadline by some hundredths
        script.errors = [full(3.0)]
        began = time.monotonic()
        error = await failure(connection.unary(unary, b"", 0.5))  # there is no point in waiting
        assert (error.reason, time.monotonic() - began < 2.5) == ("QUEUE_FULL", True)


async def test_a_started_stream_is_not_restarted() -> None:
    script = Script("late")
    async with talking(script) as (connection, _, streaming):
        seen = []
        with pytest.raises(CallError):  # noqa: PT012
            async for message in connection.stream(streaming, b""):
                seen.append(message)  # noqa: PERF401
    assert (seen, len(script.times)) == ([b"first"], 1)


async def test_an_unreachable_server() -> None:
    patient, eager = RetryPolicy(attempts=2, first_s=0.01), RetryPolicy(unreachable=False)
    for retry in (patient, eager):
        connection = Connection(["127.0.0.1:1"], Credentials(), retry)
        error = await failure(connection.unary(lambda at: at.unary_unary("/a.B/U"), b""))
        assert (error.reached, error.code) == (False, grpc.StatusCode.UNAVAILABLE)
        assert "no specdec server answers at 127.0.0.1:1" in str(error)
        await connection.close()


async def test_bug_closing_the_client_ends_the_pause_before_a_retry() -> None:
    paused = asyncio.Event()

    class Patient(RetryPolicy):
        def pause_s(self, error: CallError, attempt: int, draw: float) -> float | None:
            paused.set()
            return 600.0 if error.code == grpc.StatusCode.UNAVAILABLE else None

    connection = Connection(["127.0.0.1:1"], Credentials(), Patient())
    calling = asyncio.create_task(failure(connection.unary(lambda at: at.unary_unary("/a.B/U"), b"")))
    async with asyncio.timeout(60):
        await paused.wait()
        await connection.close()
        assert (await calling).code == grpc.StatusCode.CANCELLED


async def test_each_address_is_tried_once_whatever_the_policy() -> None:
    async with talking(Script()) as (connection, unary, _):
        both = Connection(["127.0.0.1:1", connection.address], Credentials(), RetryPolicy(unreachable=False))
        assert await both.unary(unary, b"") == b"answer"
        await both.close()


async def test_bug_an_address_where_nothing_answers_leaves_time_for_the_next() -> None:
    """Such as a machine that is off, or a process that hangs."""
    silent = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    address = "{}:{}".format(*silent.sockets[0].getsockname())
    async with talking(Script()) as (connection, unary, _):
        both = Connection([address, connection.address], Credentials(), RetryPolicy(unreachable=False))
        assert await both.unary(unary, b"", CONNECT_S) == b"answer"
        await both.close()
    silent.close()


def test_bug_tries_without_end_pause_for_the_longest() -> None:
    """The doubled pause was a number that no float holds."""
    policy = RetryPolicy(attempts=1_000_000, longest_s=5)
    assert policy.pause_s(CallError(grpc.StatusCode.UNAVAILABLE, ""), 2000, 0.0) == 5


async def test_another_address_is_tried_without_the_pause_of_a_hint() -> None:
    restarting = Script(EngineDeadError("the engine is restarting", 25.0))
    async with talking(restarting) as (here, unary, _), talking(Script()) as (there, _, _):
        both = Connection([here.address, there.address], Credentials(), RetryPolicy())
        assert await both.unary(unary, b"", 20.0) == b"answer"  # the pause would exceed the time
        await both.close()
    assert len(restarting.times) == 1


async def test_every_try_sends_the_key_and_cancelling_ends_it() -> None:
    script = Script(full(0.01), full(60))
    policy = RetryPolicy(longest_s=100)
    async with talking(script, policy, Credentials(key="sd-k")) as (connection, unary, _):
        waiting = asyncio.create_task(connection.unary(unary, b""))
        while len(script.times) < 2:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert [m["authorization"] for m in script.metadata] == ["Bearer sd-k"] * 2


@given(
    code=CODES, hint=st.none() | st.floats(0, 1000), attempt=st.integers(1, 9), draw=st.floats(0, 1, exclude_max=True)
)
@example(code=grpc.StatusCode.UNAVAILABLE, hint=1.0, attempt=6, draw=0.0)
@example(code=grpc.StatusCode.UNAVAILABLE, hint=None, attempt=8, draw=0.0)
@example(code=grpc.StatusCode.RESOURCE_EXHAUSTED, hint=1.0, attempt=8, draw=0.0)
def test_bug_pauses_grow_to_the_longest_also_where_the_server_hints_at_a_shorter_one(
    code: grpc.StatusCode, hint: float | None, attempt: int, draw: float
) -> None:
    """A server that loads hints at a second each time: all tries were spent before it was ready."""
    policy = RetryPolicy(attempts=9, first_s=0.5, longest_s=20, jitter=0.5)
    pause = policy.pause_s(CallError(code, "", retry_after_s=hint), attempt, draw)
    exhausted = code == grpc.StatusCode.RESOURCE_EXHAUSTED
    wanted = hint if exhausted and hint is not None else max(hint or 0.0, min(0.5 * 2 ** (attempt - 1), 20))
    again = code == grpc.StatusCode.UNAVAILABLE or (exhausted and hint is not None)
    if not again or attempt >= 9 or wanted > 20:
        assert pause is None
    else:
        assert pause is not None
        assert wanted <= pause <= 1.5 * wanted


def test_incomplete_credentials_are_rejected(tmp_path: Any) -> None:
    for bad in ({"cert": tmp_path}, {"ca": tmp_path}, {"tls": True, "cert": tmp_path}):
        with pytest.raises(ConfigError):
            Credentials(**bad)
    with pytest.raises(ConfigError, match=r"none\.pem"):
        Connection(["h:1"], Credentials(tls=True, ca=tmp_path / "none.pem"), QUICK)


@pytest.mark.parametrize(
    ("workspace", "session", "expected"),
    [
        ("", "", {}),
        ("", "Größe 7%", {"x-session-id": "Gr%C3%B6%C3%9Fe%207%25"}),
        ("w 1", "", {"x-workspace-id": "w%201"}),
        ("w", "s", {"x-workspace-id": "w", "x-session-id": "s"}),
        ("w", "\u4e16" * 1024, {"x-workspace-id": "w", "x-session-id": ("%E4%B8%96" * 1024)[:2048]}),
    ],
)
async def test_a_call_has_headers_that_keep_it_on_one_server(
    workspace: str, session: str, expected: dict[str, str]
) -> None:
    script = Script()
    request = generation_pb2.GenerateRequest()
    request.session.id = session
    as_bytes = {"request_serializer": generation_pb2.GenerateRequest.SerializeToString}
    async with talking(script, workspace=workspace) as (connection, _, _):
        await connection.unary(lambda at: at.unary_unary("/a.B/U", **as_bytes), request)
        stream = connection.stream(lambda at: at.unary_stream("/a.B/S", **as_bytes), request)
        assert [message async for message in stream] == [b"answer"]
    for metadata in script.metadata:
        assert {name: value for name, value in metadata.items() if name.startswith("x-")} == expected
    assert len(script.metadata) == 2


async def test_a_unary_call_is_renamed_if_its_lost_try_still_runs() -> None:
    taken = DuplicateRequestError("request_id 'r' is in flight; choose another")
    request, kind = generation_pb2.GenerateRequest(request_id="r"), generation_pb2.GenerateRequest
    script = Script(grpc.StatusCode.UNAVAILABLE, taken)
    async with talking(script) as (connection, _, _):
        method = lambda at: at.unary_unary("/a.B/U", request_serializer=kind.SerializeToString)  # noqa: E731
        assert await connection.unary(method, request) == b"answer"
        assert [kind.FromString(asked).request_id for asked in script.asked] == ["r", "r", "r~"]
        script.errors.append(taken)  # by another call
        assert (await failure(connection.unary(method, request))).code == grpc.StatusCode.ALREADY_EXISTS


async def test_a_call_that_is_reset_before_its_first_message_is_retried() -> None:
    script = Script("reset", "reset", None, "reset", "reset")
    async with talking(script) as (connection, unary, method):
        assert await whole(connection, method) == [b"answer"]
        assert await connection.unary(unary, b"") == b"answer"
        assert len(script.times) == 6
        script.errors = ["reset"] * QUICK.attempts
        error = await failure(connection.unary(unary, b""))
        assert (error.code, error.reached, script.errors) == (grpc.StatusCode.UNAVAILABLE, False, [])
