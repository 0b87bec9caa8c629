"""The paced engine: its messages and their order; and the clients that read its stamps."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.frontend.frontend_bench import (
    FACTORY,
    FrontendPlan,
    GrpcReader,
    HttpReader,
    ReaderError,
    measure_frontend,
)
from bench.frontend.paced_engine import TOKENS, ByteTokenizer, build, now_ns, paced_target, read_stamps, stamp
from server.serving import Serving
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.core.types import Delta, Finished, FinishReason, Request, Started, StoppingParams

TIMES = st.lists(st.integers(0, 10**18 - 1), min_size=1, max_size=3)


@given(TIMES, TIMES)
@settings(max_examples=50)
def test_stamps_come_back_and_can_be_joined(first: list[int], second: list[int]) -> None:
    assert read_stamps(stamp(*first)) == first
    assert read_stamps(stamp(*first) + stamp(*second)) == first + second


def test_what_is_no_stamp_is_told() -> None:
    for text in ("hello", stamp(1) + "x", "x;"):
        with pytest.raises(ValueError, match=r"stamp|invalid literal"):
            read_stamps(text)


@given(st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_every_request_is_told_in_order(limit: int, requests: int) -> None:
    engine = build(EngineConfig(target=paced_target(0.5)), lambda *progress: None)
    before = now_ns()
    for number in range(requests):
        engine.submit(Request(str(number), (1, 2), stopping=StoppingParams(max_tokens=limit)))
    events = []
    while engine.has_work():
        events += engine.step()
    for number in range(requests):
        own = [event for event in events if event.request_id == str(number)]
        deltas = [event for event in own if isinstance(event, Delta)]
        assert isinstance(own[0], Started)
        assert isinstance(own[-1], Finished)
        assert len(own) == len(deltas) + 2
        assert own[-1].usage.output_tokens == limit == sum(len(delta.token_ids) for delta in deltas)
        assert all(len(delta.token_ids) <= TOKENS for delta in deltas)
        stamps = [time for delta in deltas for time in read_stamps(delta.text)]
        assert stamps == sorted(stamps)
        assert before <= stamps[0] <= stamps[-1] <= now_ns()
        assert len(stamps) == len(deltas) + 1  # the first has the time of arrival too


def test_messages_keep_the_step_and_newcomers_do_not_wait_for_it() -> None:
    """No message leaves before the end of its step, and new requests get their first message at once."""
    engine = build(EngineConfig(target=paced_target(20)), lambda *progress: None)
    engine.submit(Request("a", (1,), stopping=StoppingParams(max_tokens=3 * TOKENS)))
    (arrival, _) = next(read_stamps(event.text) for event in engine.step() if isinstance(event, Delta))
    engine.submit(Request("b", (1,), stopping=StoppingParams(max_tokens=TOKENS)))
    assert {event.request_id for event in engine.step()} == {"b"}
    stamps = [read_stamps(e.text)[-1] for _ in range(2) for e in engine.step() if isinstance(e, Delta)]
    assert stamps[0] - arrival >= 20e6
    assert stamps[1] - arrival >= 40e6
    assert not engine.has_work()


def test_an_abort_ends_it() -> None:
    engine = build(EngineConfig(target=paced_target(1)), lambda *progress: None)
    engine.submit(Request("a", (1,), stopping=StoppingParams(max_tokens=100)))
    engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    (end,) = engine.step()
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.ABORTED
    assert not engine.has_work()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_readers_get_every_message(protocol: str) -> None:
    config = Config(engine=EngineConfig(target=paced_target(1)), server=ServerConfig(grpc_port=0, http_port=0))
    serving = Serving(config, lambda _: ByteTokenizer(), factory=FACTORY)
    addresses = await serving.start()

    def read(limits: tuple[int, ...]) -> None:
        assert addresses.http_port is not None
        reader = GrpcReader(addresses.grpc_port) if protocol == "grpc" else HttpReader(addresses.http_port)
        try:
            for limit in limits:
                before = now_ns()
                heard = [(at, read_stamps(text)) for at, text in reader.read("hello", limit)]
                assert len(heard) == -(-limit // TOKENS)
                assert all(before <= stamps[-1] <= at for at, stamps in heard)
        finally:
            reader.close()

    try:
        with pytest.raises(ReaderError, match="503" if protocol == "http" else "UNAVAILABLE"):  # it is not ready
            await asyncio.to_thread(read, (1,))
        await serving.wait_ready()
        await asyncio.to_thread(read, (1, 7, 200))  # all over one connection
    finally:
        await serving.stop()


@pytest.mark.parametrize("kind", [GrpcReader, HttpReader])
def test_a_connection_that_ends_is_no_answer(kind: type[GrpcReader] | type[HttpReader]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def end() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)

        ending = threading.Thread(target=end)
        ending.start()
        reader = kind(listener.getsockname()[1])
        with pytest.raises(ReaderError):
            next(reader.read("hello", 4))
        ending.join()
        reader.close()


def test_bug_a_server_that_hangs_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = HttpReader(listener.getsockname()[1])
        reader._connection.sock.settimeout(0.05)
        with pytest.raises(ReaderError, match="timed out"):
            next(reader.read("hello", 4))
        reader.close()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_protocol_is_measured(protocol: str) -> None:
    """With real processes and sockets: every message arrives, and every figure is plausible."""
    plan = FrontendPlan(
        requests=3, messages=4, step_ms=1.0, streams=3, busy_step_ms=20.0, seconds=1.0, protocols=(protocol,)
    )
    figures = (await measure_frontend(plan))[protocol]
    assert figures["added_ttft_ms"]["n"] == 3
    assert figures["message_way_ms"]["n"] == 12
    assert 0 < figures["message_way_ms"]["p50"] <= figures["message_way_ms"]["max"]
    assert figures["busy_message_way_ms"]["n"] == 3 * 49
    assert 0 <= figures["cpu_share"] <= 1
    assert figures["messages_per_s"] == 150
