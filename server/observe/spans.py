"""Calls and requests as OpenTelemetry spans. Imported only if tracing is on; needs the `otel` extra."""

from __future__ import annotations

import time
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanProcessor
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import specdec
from server.observe.records import CallRecord, RequestRecord, TelemetryListener

_PROTOCOL = {"grpc": "rpc.system", "http": "network.protocol.name"}
_STATUS = {"grpc": "rpc.response.status_code", "http": "http.response.status_code"}
_FAULTS = ("5", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")


class Spans(TelemetryListener):
    """A span per call, which continues the caller's trace. Its child `llm_request` per request has children `queue`,
    `prefill` and `decode`. Attributes have vLLM's names where vLLM has one.

    A caller decides whether its trace is exported. Traces that begin here are.
    """

    def __init__(self, exporter: SpanExporter, processor: SpanProcessor | None = None) -> None:
        resource = Resource.create({"service.name": "specdec", "service.version": specdec.__version__})
        # Not the global provider: one process may run several servers.
        self._provider = TracerProvider(sampler=DEFAULT_ON, resource=resource)
        self._exporter = exporter
        self._provider.add_span_processor(processor or BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specdec", specdec.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def call_began(self, call: CallRecord) -> None:
        span = self._tracer.start_span(
            call.endpoint,
            context=self._propagator.extract(call.trace_headers),
            kind=SpanKind.SERVER,
            attributes={_PROTOCOL[call.protocol]: call.protocol},
            start_time=_ns(call.at_s),
        )
        call.span = span
        call.trace_id = f"{span.get_span_context().trace_id:032x}"

    def request_ended(self, record: RequestRecord) -> None:
        parent = None if record.call is None else record.call.span  # which may have ended
        context = None if parent is None else set_span_in_context(parent)
        shift_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, _attributes(record), start_time=_ns(record.made_s + shift_s)
        )
        if record.error is not None:
            span.set_status(StatusCode.ERROR, record.error.reason)
        inside = set_span_in_context(span)
        for name, began_s, ended_s in _phases(record):
            phase = self._tracer.start_span(name, inside, start_time=_ns(began_s + shift_s))
            phase.end(_ns(ended_s + shift_s))
        span.end(_ns(record.ended_s + shift_s))

    def call_ended(self, call: CallRecord) -> None:
        span: Span = call.span
        span.update_name(f"{call.protocol} {call.endpoint}")
        status = int(call.status) if call.protocol == "http" else call.status  # as OpenTelemetry types the two
        span.set_attributes({_STATUS[call.protocol]: status, "gen_ai.request.id": call.request_id})
        if call.reason:
            span.set_attribute("error.type", call.reason)
        # An HTTP stream has its status before it breaks off.
        broken = any(record.error is not None and record.error.http_status >= 500 for record in call.requests)
        if broken or call.status.startswith(_FAULTS):
            span.set_status(StatusCode.ERROR, call.reason)
        span.end(_ns(call.at_s + call.duration_s))

    def close(self) -> None:
        self._provider.shutdown()

    def hurry(self) -> None:
        self._exporter.shutdown()  # breaks off the export that runs; later ones fail without a try


def _attributes(record: RequestRecord) -> dict[str, Any]:
    request, finished = record.request, record.finished
    found: dict[str, Any] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.request.n": request.sampling.n,
        "specdec.speculation.mode": request.speculation.mode.value,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.latency.e2e": record.ended_s - record.began_s,
        "specdec.complete": record.complete,
    }
    if record.model:
        found["gen_ai.request.model"] = record.model
    if request.stopping.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.stopping.max_tokens
    if record.started is not None:
        found["gen_ai.usage.prompt_tokens"] = record.started.prompt_tokens
        found["specdec.usage.cached_tokens"] = record.started.cached_tokens
        found["gen_ai.latency.time_in_queue"] = record.started.queue_ms / 1e3
    if record.ttft_s is not None:
        found["gen_ai.latency.time_to_first_token"] = record.ttft_s
    if finished:
        prefill = max(end.timings.prefill_ms for end in finished) / 1e3
        decode = max(end.timings.decode_ms for end in finished) / 1e3
        found |= {
            "gen_ai.latency.time_in_model_prefill": prefill,
            "gen_ai.latency.time_in_model_decode": decode,
            "gen_ai.latency.time_in_model_inference": prefill + decode,
            "gen_ai.response.finish_reasons": [end.reason.value for end in finished],
            "specdec.speculation.steps": sum(end.stats.num_steps for end in finished),
            "specdec.speculation.draft_tokens": sum(end.stats.num_draft_tokens for end in finished),
            "specdec.speculation.accepted_tokens": sum(end.stats.num_accepted_draft_tokens for end in finished),
        }
    return found


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Name, begin and end, in monotonic seconds, of the phases of the request."""
    if record.started is None:
        return [("queue", record.made_s, record.ended_s)]
    scheduled_s = min(record.made_s + record.started.queue_ms / 1e3, record.ended_s)
    first_s = record.ended_s if record.first_s is None else max(record.first_s, scheduled_s)
    found = [("queue", record.made_s, scheduled_s), ("prefill", scheduled_s, first_s)]
    return [*found, ("decode", first_s, record.ended_s)] if record.first_s is not None else found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
