"""The engine's process seen from its client: order, aborts, deaths, restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from server.admission import Admission
from server.auth.principal import ANYBODY
from server.engine_client import MAX_SUSPECTS, EngineClient, RequestTable, Suspects
from server.engine_supervisor import EngineStartError, EngineState
from server.errors import DeadlinePassedError, GenerationFailedError, PoisonRequestError
from server.http.errors import refusal_of
from server.ipc import Frame, pack, pack_event
from server.observe.records import NO_RETRY_HEADER
from server.request_stream import UnreadEvents
from specdec.config import ServerConfig
from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    ResumeParams,
    SamplingParams,
    SpeculationParams,
    SpeculationStats,
    Started,
    StoppingParams,
    Timings,
    Usage,
)
from specdec.errors import (
    UNAVAILABLE_RETRY_S,
    DuplicateRequestError,
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
)
from tests.server.harness import make_client, make_config, quick_policy, running_client

SOON_S = 0.01


def make_request(request_id: str = "r", text: bytes = b"hello", salt: str = "", n: int = 1) -> Request:
    return Request(request_id, tuple(text), SamplingParams(n=n), cache_salt=salt)


class Sent:
    """The frames that a `RequestTable` sends."""

    def __init__(self) -> None:
        self.frames: list[tuple[Any, ...]] = []

    def __call__(self, *parts: Any) -> None:
        self.frames.append(parts)

    @property
    def submitted(self) -> list[str]:
        """The engine ids of the requests."""
        return [parts[1].request_id for parts in self.frames if parts[0] is Frame.SUBMIT]


def test_requests_that_end_with_another_are_failed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = RequestTable(sent := Sent())
    monkeypatch.setattr(table, "_unread", UnreadEvents(3000))
    for name in ("a", "slow"):
        table.submit(make_request(name))
    table.deliver(Delta(sent.submitted[-1], 0, [1] * 10, "x" * 400, [], None))
    table.fail_all(EngineDeadError())  # the error of "a" is one event too many for "slow"
    assert len(table) == 0


def test_late_events_of_a_request_do_not_reach_the_next_one_of_its_id() -> None:
    table = RequestTable(sent := Sent())
    table.submit(make_request("r")).close()
    again = table.submit(make_request("r"))
    table.deliver(end_of(sent.submitted[0], FinishReason.ABORTED))
    assert again.samples_left == 1


async def collect(client: EngineClient, request: Request) -> list[RequestEvent]:
    async with client.generate(request) as stream:
        return [event async for event in stream]


async def eventually_aborts(client: EngineClient, count: int) -> bool:
    """Return whether the fake engine's abort count, reported by heartbeat, reaches ``count``."""
    for _ in range(100):
        if client.engine.load.prefix_hit_tokens == count and client.engine.load.running_requests == 0:
            return True
        await asyncio.sleep(0.05)
    return False


async def in_flight(client: EngineClient) -> None:
    """Wait until a request was sent to the engine."""
    async with asyncio.timeout(15):
        while not client.in_flight:
            await asyncio.sleep(0)


async def test_events_arrive_in_order_under_the_callers_id() -> None:
    async with running_client() as client:
        events = await collect(client, make_request("mine", n=2))
        assert client.in_flight == 0
    assert isinstance(events[0], Started)
    assert {e.request_id for e in events} == {"mine"}
    for index, echo in enumerate([b"hello", b"elloh"]):
        own = [e for e in events[1:] if not isinstance(e, Started) and getattr(e, "index", None) == index]
        deltas, last = own[:-1], own[-1]
        assert bytes(t for d in deltas if isinstance(d, Delta) for t in d.token_ids) == echo
        assert isinstance(last, Finished)
        assert (last.reason, last.usage.output_tokens) == (FinishReason.LENGTH, 5)


async def test_one_frame_per_step_carries_several_tokens() -> None:
    async with running_client() as client:
        request = Request("r", tuple(b"abcdef"), speculation=SpeculationParams(width=3))
        events = await collect(client, request)
    assert [e.text for e in events if isinstance(e, Delta)] == ["abc", "def"]


async def test_closing_a_stream_aborts_the_request_immediately() -> None:
    async with running_client(silent_s=2.0) as client:
        async with client.generate(make_request("left", b"x" * 100, "slow")) as stream:
            await anext(stream)
        assert client.in_flight == 0
        task = asyncio.create_task(collect(client, make_request("cancelled", b"x" * 100, "slow")))
        await in_flight(client)
        task.cancel()
        assert await eventually_aborts(client, 2)
        again = await collect(client, make_request("left"))  # the id is free for use again
    assert len([e for e in again if isinstance(e, Delta)]) == 5


async def test_abort_ends_every_unfinished_sample() -> None:
    async with running_client() as client:
        async with client.generate(make_request("a", b"x" * 100, "slow", n=3)) as stream:
            await anext(stream)
            assert client.abort("a")
            rest = [e async for e in stream]
        assert not client.abort("a")
    assert sorted((e.index, e.reason) for e in rest if isinstance(e, Finished)) == [
        (i, FinishReason.ABORTED) for i in range(3)
    ]


async def test_the_engine_ends_requests_past_their_deadline() -> None:
    async with running_client() as client:
        with pytest.raises(DeadlinePassedError):
            await collect(client, Request("late", tuple(b"x" * 100), deadline_s=0.2, cache_salt="slow"))


async def test_rejections_are_raised_unchanged_and_affect_no_other_request() -> None:
    async with running_client() as client:
        other = asyncio.create_task(collect(client, make_request("other", b"x" * 20, "slow")))
        with pytest.raises(QueueFullError) as full:
            await collect(client, make_request("f", salt="full"))
        with pytest.raises(PromptTooLongError) as long:
            await collect(client, make_request("l", salt="long"))
        with pytest.raises(GenerationFailedError) as bug:
            await collect(client, make_request("b", salt="bug"))
        with pytest.raises(GenerationFailedError) as broken:
            await collect(client, make_request("m", salt="broken"))
        async with client.generate(make_request("twin", salt="slow")):
            with pytest.raises(DuplicateRequestError):
                client.generate(make_request("twin"))
        events = await other
        assert (client.engine.restarts, client.in_flight) == (0, 0)
    assert (full.value.limit, full.value.retry_after_s) == (7, 2.5)
    assert (long.value.limit, long.value.got) == (11, 12)
    assert (bug.value.reason, broken.value.reason) == ("INTERNAL", "MODEL_BROKEN")
    assert "secret" not in str(bug.value)
    assert len([e for e in events if isinstance(e, Delta)]) == 20


@pytest.mark.parametrize("how", ["die", "exit", "kill"])
async def test_a_crash_fails_all_requests_in_flight_and_the_engine_restarts(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_client() as client:
        bystander = asyncio.create_task(collect(client, make_request("bystander", b"x" * 100, "slow")))
        await in_flight(client)
        assert client.engine.pid is not None
        if how == "kill":
            os.kill(client.engine.pid, signal.SIGKILL)
        else:
            with pytest.raises(EngineDeadError):
                await collect(client, make_request("cause", salt=how))
        with pytest.raises(EngineDeadError):
            await bystander
        with pytest.raises(EngineDeadError):
            client.generate(make_request("too early"))
        assert client.engine.state == EngineState.RESTARTING
        await client.engine.wait_ready()
        events = await collect(client, make_request("after"))
        assert client.engine.restarts == 1
    assert isinstance(events[-1], Finished)
    reasons = {
        "die": "of fake died: RuntimeError: the fake engine was told to die",
        "exit": "no error message; exit code 7",
        "kill": "no error message; killed by signal 9, perhaps by the kernel for lack of memory",
    }
    assert reasons[how] in caplog.text


async def test_a_silent_engine_is_restarted_and_an_idle_one_is_not() -> None:
    async with running_client(silent_s=2.0) as client, asyncio.timeout(20):
        await asyncio.sleep(2.5)  # longer than it may be silent
        assert client.engine.restarts == 0
        with pytest.raises(EngineDeadError):
            await collect(client, make_request(salt="hang"))
        await client.engine.wait_ready()
        assert client.engine.restarts == 1
        assert isinstance((await collect(client, make_request()))[-1], Finished)


async def test_repeated_crashes_end_in_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with running_client(give_up_after=2) as client:
        for last in (False, True):
            with pytest.raises(EngineDeadError, match="restart the server" if last else "retry shortly") as died:
                await collect(client, make_request(salt="exit"))
            assert (died.value.retry_after_s is None) is last
            if client.engine.state != EngineState.FAILED:
                await asyncio.wait([asyncio.create_task(client.engine.wait_ready())], timeout=5)
        failure = await asyncio.wait_for(client.engine.wait_failed(), 5)
        with pytest.raises(EngineDeadError, match="restart the server") as refused:
            client.generate(make_request())
        assert client.engine.state == EngineState.FAILED
    assert refused.value.retry_after_s is None
    assert "2 times" in failure
    assert "exit code 7" in failure
    assert f"{failure}; it is not started any more" in caplog.messages


@pytest.mark.parametrize(
    ("target", "message"),
    [("missing", "model 'missing' cannot be found; fetch it"), ("crash", "crashed while loading")],
)
async def test_an_engine_that_cannot_start_reports_why(target: str, message: str) -> None:
    client = make_client(make_config(target=target), policy=quick_policy(give_up_after=2))
    await client.engine.start()
    with pytest.raises(EngineStartError) as caught:
        await asyncio.wait_for(client.engine.wait_ready(), 20)
    await client.engine.close()
    assert message in str(caught.value)
    assert client.engine.restarts == (0 if target == "missing" else 1)


async def test_loading_progress_is_reported() -> None:
    seen: list[tuple[str, int, int]] = []
    client = make_client(make_config(), progress=lambda label, done, total: seen.append((label, done, total)))
    await client.engine.start()
    info = await client.engine.wait_ready()
    await client.engine.close()
    assert (info.target, info.eos_ids) == ("fake", (0,))
    assert seen == [("load fake", 1, 2), ("load fake", 2, 2)]


@pytest.mark.parametrize("step", ["process", "link"])
async def test_bug_closing_a_client_during_start_leaves_no_process(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled when the process has just started, or its link: the loop that ends next would find them open."""
    client, loop = make_client(), asyncio.get_running_loop()
    started: list[asyncio.subprocess.Process] = []
    exec_, connect = asyncio.create_subprocess_exec, loop.create_unix_connection

    def cancel() -> None:
        assert client.engine._supervision is not None
        client.engine._supervision.cancel()

    async def start(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        started.append(await exec_(*args, **options))
        if step == "process":
            cancel()
        return started[0]

    async def link(*args: Any, **options: Any) -> Any:
        made = await connect(*args, **options)
        if step == "link":
            cancel()
        return made

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(loop, "create_unix_connection", link)
    others = asyncio.all_tasks()
    await client.engine.start()
    assert client.engine._supervision is not None
    await asyncio.wait([client.engine._supervision])
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    await client.engine.close()
    assert asyncio.all_tasks() <= others


async def test_bug_closing_a_client_during_shutdown_leaves_no_process() -> None:
    """The reader of the process's output would keep reading, as when a grandchild holds the pipe open."""
    others = asyncio.all_tasks()
    async with running_client() as client:
        child = client.engine._child
        assert child is not None
        child._printing.cancel()
        child._printing = asyncio.create_task(asyncio.sleep(3600))
        os.kill(child.pid, signal.SIGKILL)
        while client.engine._child is not None:  # then how it ended is waited for
            await asyncio.sleep(0)
    assert child._printing.done()
    assert asyncio.all_tasks() <= others


async def test_a_request_that_crashes_the_engine_is_retried_once_alone_and_then_rejected() -> None:
    poison, innocent = make_request("p", salt="die"), make_request("i", b"innocent", "slow")
    async with running_client() as client:
        for restarts in (1, 2):
            concurrent = asyncio.create_task(collect(client, innocent))
            await in_flight(client)
            with pytest.raises(EngineDeadError):
                await collect(client, poison)
            if restarts == 1:
                with pytest.raises(EngineDeadError):
                    await concurrent
            else:  # it had ended before the poison was sent
                assert isinstance((await concurrent)[-1], Finished)
            while client.engine.restarts < restarts:
                await asyncio.sleep(0.01)
            await client.engine.wait_ready()
        with pytest.raises(PoisonRequestError, match="stopped the engine twice") as refused:
            client.generate(replace(poison, request_id="again", deadline_s=19.5))
        headers = dict(refusal_of(refused.value, {}).headers)
        assert headers[NO_RETRY_HEADER.encode()] == b"true"
        assert headers[b"x-should-retry"] == b"false"
        await collect(client, innocent)
        assert (client.engine.restarts, client.in_flight) == (2, 0)


async def test_the_queue_behind_a_request_that_runs_alone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.engine_client.MAX_QUEUED_REQUESTS", 2)
    suspect = make_request("s", b"x" * 100, "slow")
    async with running_client() as client:
        running = asyncio.create_task(collect(client, suspect))
        await in_flight(client)
        assert client.engine.pid is not None
        os.kill(client.engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await running
        await client.engine.wait_ready()
        doors = Admission(client, ServerConfig())
        streams = [doors.admit(ANYBODY, request) for request in (suspect, make_request("1"), make_request("2"))]
        with pytest.raises(QueueFullError, match=r"queue is full \(2 requests\)") as refused:
            doors.admit(ANYBODY, make_request("3"))
        assert refused.value.retry_after_s == UNAVAILABLE_RETRY_S
        for stream in streams:
            stream.close()
        assert doors.in_flight == 0
        assert isinstance((await collect(client, make_request("after")))[-1], Finished)


async def test_a_request_that_waits_when_the_engine_dies_is_not_blamed() -> None:
    suspect = make_request("s", b"x" * 100, "slow")
    errors: list[EngineDeadError] = []
    async with running_client() as client:
        for requests in ([suspect], [suspect, make_request("waiting"), make_request("behind it")]):
            streams = [client.generate(request) for request in requests]
            assert client.engine.pid is not None
            os.kill(client.engine.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError) as caught:
                    _ = [event async for event in stream]
                errors.append(caught.value)
            await client.engine.wait_ready()
    assert [error.engines_stopped for error in errors] == [1, 1, 0, 0]


class RecordedEngine:
    """In place of an `EngineSupervisor`: ready, and keeps what it is sent."""

    def __init__(self) -> None:
        self.send = Sent()

    def check_ready(self) -> None:
        """It is."""

    @property
    def sent(self) -> list[tuple[Any, ...]]:
        """The frames."""
        return self.send.frames

    @property
    def submitted(self) -> list[str]:
        """The engine ids of the requests that it got."""
        return self.send.submitted


def client_of(engine: RecordedEngine) -> EngineClient:
    return EngineClient(engine)  # type: ignore[arg-type]


def blocked_client(engine: RecordedEngine) -> EngineClient:
    """A client whose engine runs the suspect `s` alone."""
    client, suspect = client_of(engine), make_request("s")
    client.generate(suspect)
    client.on_lost(EngineDeadError(), died=True)
    client.generate(suspect)
    return client


def holds_back(client: EngineClient) -> bool:
    """Whether a request that comes now is not sent to the `RecordedEngine` of ``client``."""
    engine = cast(RecordedEngine, client.engine)
    before = len(engine.submitted)
    client.generate(make_request("probe", b"probe")).close()
    return len(engine.submitted) == before


def end_suspect(client: EngineClient, engine: RecordedEngine) -> None:
    answer(client, end_of(engine.submitted[-1]))


async def test_a_request_that_has_not_been_sent_to_the_engine_can_be_aborted() -> None:
    engine = RecordedEngine()
    client = blocked_client(engine)
    held = client.generate(make_request("h", n=2))
    assert client.abort("h")
    assert [event.reason async for event in held if isinstance(event, Finished)] == [FinishReason.ABORTED] * 2
    client.generate(make_request("l")).close()
    sent = len(engine.sent)
    end_suspect(client, engine)
    assert (client.in_flight, len(engine.sent)) == (0, sent)
    client.generate(make_request("h"))
    assert len(engine.sent) == sent + 1


def test_a_request_that_waited_is_sent_with_the_time_that_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=1.0)
    monkeypatch.setattr("server.engine_client.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    engine = RecordedEngine()
    client = blocked_client(engine)
    client.generate(make_request("held", b"held"))
    clock.now_s = 2.5
    end_suspect(client, engine)
    client.generate(make_request("new", b"new"))
    sent = [(parts[1].request_id.partition(":")[2], parts[2]) for parts in engine.sent[-2:]]
    assert sent == [("held", 1.5), ("new", 0.0)]


def test_a_request_behind_one_that_is_dropped_is_sent() -> None:
    engine = RecordedEngine()
    client, suspect = client_of(engine), make_request("suspect")
    client.generate(suspect)
    client.on_lost(EngineDeadError(), died=True)
    client.generate(make_request("runs", b"runs"))
    held = client.generate(suspect)
    client.generate(make_request("behind", b"behind"))
    held.close()
    assert [engine_id.partition(":")[2] for engine_id in engine.submitted] == ["suspect", "runs", "behind"]


async def test_a_request_that_was_left_while_it_waited_is_forgotten_before_its_deadline() -> None:
    engine = RecordedEngine()
    client, suspect = client_of(engine), make_request("suspect")
    client.generate(suspect)
    client.on_lost(EngineDeadError(), died=True)
    client.generate(suspect)
    held = client.generate(replace(make_request("held", b"held"), deadline_s=3600.0))
    seen = weakref.ref(held)
    held.close()
    del held
    assert seen() is None


def answer(client: EngineClient, *events: RequestEvent) -> None:
    packed = msgpack.packb([pack_event(event) for event in events], default=pack)
    client.on_frame([Frame.EVENTS, msgpack.unpackb(packed)])


def end_of(engine_id: str, reason: FinishReason = FinishReason.EOS, index: int = 0) -> Finished:
    return Finished(engine_id, index, reason, None, Usage(5), SpeculationStats(), Timings())


async def test_a_request_that_stops_the_engine_is_blamed_though_its_reader_has_left() -> None:
    client = client_of(RecordedEngine())
    poison, innocent = make_request("p"), make_request("i", b"innocent")
    for is_known in (False, True):
        client.generate(poison).close()
        assert client.in_flight == 0
        other = client.generate(innocent)
        client.on_lost(EngineDeadError(), died=True)
        with pytest.raises(EngineDeadError) as caught:
            await anext(other)
        assert caught.value.engines_stopped == (0 if is_known else 1)  # it waits for one that runs alone
    with pytest.raises(PoisonRequestError):
        client.generate(poison)
    assert client.generate(innocent).samples_left


@pytest.mark.parametrize("how", ["ends", "fails"])
async def test_a_request_that_the_engine_has_ended_is_not_blamed(how: str) -> None:
    engine = RecordedEngine()
    client, request = client_of(engine), make_request("r", n=2)
    client.generate(request).close()
    (engine_id,) = engine.submitted
    assert engine.sent[-1] == (Frame.ABORT, engine_id)
    if how == "ends":
        answer(client, *(end_of(engine_id, FinishReason.ABORTED, index) for index in range(2)))
    else:
        answer(client, end_of(engine_id), Failed(engine_id, "MODEL_BROKEN", "no finite logit"))
    client.on_lost(EngineDeadError(), died=True)
    client.generate(request)
    assert not holds_back(client)


@pytest.mark.parametrize(
    "reason", [FinishReason.EOS, FinishReason.ABORTED, FinishReason.DEADLINE, FinishReason.TIME_LIMIT]
)
async def test_only_its_own_end_clears_a_suspect(reason: FinishReason) -> None:
    engine = RecordedEngine()
    client, suspect = client_of(engine), make_request("s", n=2)
    client.generate(suspect)
    client.on_lost(EngineDeadError(), died=True)
    client.generate(suspect)
    engine_id = engine.submitted[-1]
    answer(client, end_of(engine_id, reason), end_of(engine_id, index=1))
    client.generate(suspect)
    assert holds_back(client) == (reason is not FinishReason.EOS)


async def test_a_suspect_that_is_aborted_before_it_runs_stays_one() -> None:
    client, suspect = client_of(RecordedEngine()), make_request("s")
    client.generate(suspect)
    client.on_lost(EngineDeadError(), died=True)
    client.generate(make_request("other", b"other"))
    client.generate(suspect)
    assert client.abort("s")
    assert not holds_back(client)
    client.generate(suspect)
    assert holds_back(client)


async def test_a_time_limit_ends_a_request_that_waits() -> None:
    engine = RecordedEngine()
    client = blocked_client(engine)
    sent = len(engine.sent)
    limited = replace(make_request("l", n=2), stopping=StoppingParams(time_limit_s=SOON_S))
    async with asyncio.timeout(15):
        reasons = [event.reason for event in await collect(client, limited) if isinstance(event, Finished)]
        with pytest.raises(DeadlinePassedError):
            await collect(client, replace(make_request("d"), deadline_s=SOON_S))
    assert reasons == [FinishReason.TIME_LIMIT] * 2
    assert len(engine.sent) == sent


async def test_the_engine_keeps_the_time_limit_of_a_request_that_it_got() -> None:
    engine = RecordedEngine()
    client = blocked_client(engine)
    stream = client.generate(replace(make_request("l"), stopping=StoppingParams(time_limit_s=SOON_S)))
    end_suspect(client, engine)
    await asyncio.sleep(2 * SOON_S)
    assert stream.samples_left


def test_a_suspect_is_known_by_all_but_its_time_limits_and_what_a_resumed_part_of_it_has() -> None:
    suspects = Suspects()
    suspects.died([Request("r", (1,), stopping=StoppingParams(8, time_limit_s=60.0, decode_limit_s=30.0))])
    resumed = StoppingParams(8, time_limit_s=41.5, decode_limit_s=12.5)
    assert suspects.must_run_alone(Request("again", (1,), stopping=resumed, deadline_s=3.0))
    several = Request("r", (2,), SamplingParams(temperature=0.5, n=3))
    suspects.died([several])
    part = replace(several, sampling=SamplingParams(temperature=0.5, seed=7), resume=ResumeParams((1, 2), 2, "bits"))
    assert suspects.must_run_alone(part)
    assert not suspects.must_run_alone(replace(several, sampling=SamplingParams(temperature=0.6, n=3)))
    assert not suspects.must_run_alone(Request("other", (1,), stopping=StoppingParams(9, time_limit_s=60.0)))


def test_the_number_of_remembered_suspects_is_bounded() -> None:
    suspects = Suspects()
    for number in range(MAX_SUSPECTS + 5):
        suspects.died([Request("r", (number,)), Request("twin", (number,))])
    assert len(suspects._deaths) == MAX_SUSPECTS
    assert not suspects.must_run_alone(Request("r", (0,)))
    assert suspects.must_run_alone(Request("other", (5,)))
    suspects.completed(Request("r", (5,)))
    assert not suspects.must_run_alone(Request("r", (5,)))


@pytest.mark.parametrize("failing", [errno.EMFILE, errno.ENOMEM])
async def test_a_process_that_temporarily_cannot_start_is_started_later(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    exec_, failures = asyncio.create_subprocess_exec, 0

    async def start(*args: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal failures
        if failures < 7:  # more often than an engine may die
            failures += 1
            raise OSError(failing, os.strerror(failing))
        return await exec_(*args, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with running_client(give_up_after=2) as client:
        assert (failures, client.engine.state) == (7, EngineState.READY)


async def test_the_process_ends_with_its_parent() -> None:
    async with running_client() as client:
        pid = client.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)  # its parent decides, not a signal to the group
        await asyncio.sleep(0.1)
        assert client.engine.pid == pid
        assert isinstance((await collect(client, make_request()))[-1], Finished)
    assert client.engine.state == EngineState.CLOSED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_reader_that_never_reads_blocks_no_other() -> None:
    async with running_client() as client:
        async with client.generate(make_request("idle", b"x" * 100, n=16)):
            for i in range(5):
                assert isinstance((await collect(client, make_request(f"r{i}")))[-1], Finished)
        assert client.in_flight == 0


async def test_the_engine_learns_which_settings_are_given() -> None:
    """Others depend on its device."""
    client = make_client(factory="tests.fake_engine:of_given_settings")
    await client.engine.start()
    try:
        await client.engine.wait_ready()
        assert client.engine.info.drafters == ("target",)
    finally:
        await client.engine.close()


async def test_a_stop_does_not_wait_for_the_interpreter_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """It collects the objects of torch, for longer than the engine is given to close."""
    client = make_client(factory="tests.fake_engine:slow_to_exit")
    await client.engine.start()
    await client.engine.wait_ready()
    with caplog.at_level("INFO"):
        await client.engine.close()
    assert not caplog.messages
