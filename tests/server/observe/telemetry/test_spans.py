"""Traces: which spans, under which parents, with which attributes; and nothing if disabled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from server.observe import observer
from server.observe.logs import CallLog
from server.observe.observer import Observer
from server.observe.records import CallRecord, RequestRecord, TelemetryListener
from server.observe.spans import Spans
from server.serving import Serving
from specdec.config import ServerConfig
from specdec.core.types import Request
from specdec.errors import ConfigError
from tests.fake_engine import ECHO
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import Harness, make_config, running_server, stream_request
from tests.server.http.harness import COMPLETIONS, running
from tests.server.observe.logs.capture import logged
from tests.server.test_serving import run_until_ready

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


@contextmanager
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Run servers that export traces to the exporter."""
    exporter = InMemorySpanExporter()

    def spans(endpoint: str) -> Spans:
        assert endpoint == "http://collector:4317"
        return Spans(exporter, SimpleSpanProcessor(exporter))

    monkeypatch.setattr(observer, "_spans", spans)
    yield exporter


class BrokenSpans(TelemetryListener):
    """Raises at every event of ``events``."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def call_began(self, call: CallRecord) -> None:
        self._fail("call began")

    def request_ended(self, record: RequestRecord) -> None:
        self._fail("request ended")

    def call_ended(self, call: CallRecord) -> None:
        self._fail("call ended")

    def close(self) -> None:
        self._fail("close")

    def _fail(self, event: str) -> None:
        self.events.append(event)
        raise RuntimeError(event)


def test_a_broken_listener_harms_neither_requests_nor_other_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BrokenSpans()
    monkeypatch.setattr(observer, "_spans", lambda _: broken)
    with logged() as lines, running(otlp_endpoint="http://collector:4317") as server:
        assert server.ask(prompt="hello")["choices"][0]["finish_reason"] == "length"
        assert server.comes_to(lambda: bool(lines.of("call", endpoint=COMPLETIONS)))
    assert broken.events == ["call began", "request ended", "call ended", "close"]


class HungCollector(SpanExporter):
    """An exporter whose exports end with its shutdown."""

    def __init__(self) -> None:
        self.asked, self.ended = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.ended.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.ended.set()


async def test_a_second_signal_ends_the_flush_to_a_hung_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = HungCollector()
    monkeypatch.setattr(observer, "_spans", lambda _: Spans(exporter))
    closed: list[CallLog] = []
    monkeypatch.setattr(CallLog, "close", lambda log: closed.append(log))
    config = make_config(otlp_endpoint="http://collector:4317", log_calls=True)
    serving = Serving(config, lambda _: FakeTokenizer(), factory=ECHO)
    running, addresses = await run_until_ready(serving)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
        call = Harness(serving, addresses, channel).generation.GenerateStream(stream_request())
        assert [message async for message in call]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.to_thread(exporter.asked.wait, 20)
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.wait_for(running, 20)  # a flush waits 30 s
    finally:
        exporter.ended.set()
    assert closed  # though the flush before it hung


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def inside(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    """Return whether one is the other's child and within its time, up to the rounding of clocks."""
    slack = 5_000_000
    assert inner.start_time is not None
    assert outer.start_time is not None
    assert inner.end_time is not None
    assert outer.end_time is not None
    within = outer.start_time - slack <= inner.start_time <= inner.end_time <= outer.end_time + slack
    return within and inner.parent is not None and inner.parent.span_id == outer.context.span_id


def test_an_http_call_continues_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with exported(monkeypatch) as exporter, logged() as lines, running(otlp_endpoint="http://collector:4317") as server:
        body = {"prompt": "hello", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9}
        assert server.client.post(COMPLETIONS, json=body, headers=HEADERS).status_code == 200
    found = by_name(exporter)
    call, request = found[f"http {COMPLETIONS}"], found["llm_request"]
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == PARENT
    assert inside(request, call)
    phases = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(inside(phase, request) for phase in phases)
    assert [phase.end_time for phase in phases[:-1]] == [phase.start_time for phase in phases[1:]]
    attributes = dict(request.attributes or {})
    expected = {
        "gen_ai.usage.prompt_tokens": 6, "gen_ai.usage.completion_tokens": 5, "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 1,
        "gen_ai.latency.time_in_queue": 0.0005, "specdec.speculation.accepted_tokens": 3, "specdec.complete": True,
    }  # fmt: skip
    assert expected.items() <= attributes.items()
    assert 0 < attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]  # type: ignore[operator]
    assert dict(call.attributes or {})["http.response.status_code"] == 200
    assert call.status.status_code is StatusCode.UNSET
    (line,) = lines.of("call", endpoint=COMPLETIONS)
    assert line["trace_id"] == TRACE


def test_a_stream_that_breaks_off_after_its_headers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with exported(monkeypatch) as exporter, running(otlp_endpoint="http://collector:4317") as server:
        body = {"prompt": "hello", "stream": True, "cache_salt": "broken"}
        assert server.client.post(COMPLETIONS, json=body).status_code == 200
    call = by_name(exporter)[f"http {COMPLETIONS}"]
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "MODEL_BROKEN")


async def test_a_grpc_call_continues_it_too_and_an_error_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tuple(HEADERS.items())
    with exported(monkeypatch) as exporter:
        async with running_server(otlp_endpoint="http://collector:4317") as server:
            assert [m async for m in server.generation.GenerateStream(stream_request("hello"), metadata=metadata)]
            with pytest.raises(grpc.aio.AioRpcError):
                await anext(
                    aiter(server.generation.GenerateStream(stream_request("x", salt="full"), metadata=metadata))
                )
    spans = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    calls = [span for span in spans if span.name == "grpc v1.GenerationService/GenerateStream"]
    statuses = [dict(call.attributes or {})["rpc.response.status_code"] for call in calls]
    assert statuses == ["OK", "RESOURCE_EXHAUSTED"]
    assert dict(calls[1].attributes or {})["error.type"] == "QUEUE_FULL"
    failed = [span for span in spans if span.name == "llm_request" and span.status.status_code is StatusCode.ERROR]
    assert [span.parent.span_id for span in failed if span.parent] == [calls[1].context.span_id]


def test_a_request_that_outlives_its_call_stays_in_the_calls_trace() -> None:
    exporter = InMemorySpanExporter()
    watching = Observer([Spans(exporter, SimpleSpanProcessor(exporter))])
    with watching.call("http", COMPLETIONS, lambda name: HEADERS.get(name, "")) as call:
        record = watching.request(Request("r", (1, 2)))
        call.status = "499"
    record.ended(complete=True)
    found = by_name(exporter)
    parent = found["llm_request"].parent
    assert parent is not None
    assert parent.span_id == found[f"http {COMPLETIONS}"].context.span_id


def test_the_callers_sampling_decision_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with exported(monkeypatch) as exporter, running(otlp_endpoint="http://collector:4317") as server:
        server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=UNSAMPLED)
        server.client.post(COMPLETIONS, json={"prompt": "b"})
        server.client.post(COMPLETIONS, json={"prompt": "c"}, headers={"traceparent": "nonsense"})
        server.client.post(COMPLETIONS, json={"prompt": "d"}, headers=HEADERS)
    traces = [f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans() if span.name == "llm_request"]
    assert len(set(traces)) == len(traces) == 3
    assert traces[2] == TRACE
    assert UNSAMPLED["traceparent"].split("-")[1] not in traces[:2]


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = "import server.serving, sys; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_missing_packages_are_named_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"server\.otlp_endpoint.*pip install '\.\[otel\]'"):
        observer.build_observer(ServerConfig(otlp_endpoint="http://collector:4317"), lambda ids: "", 80.0)
