"""What a configuration wants to know of its server."""

from __future__ import annotations

from server.capture.capture import Capture
from server.logs.call_log import CallLog, Decode
from server.telemetry.listener import TelemetryListener
from server.telemetry.observer import Observer
from specdec.config import ServerConfig
from specdec.errors import ConfigError


def build_observer(config: ServerConfig, decode: Decode) -> Observer:
    """An observer with a log of calls, traces and captured requests, as asked for. decode: token ids to text, for logs
    that tell it.

    Raises:
        ConfigError: traces are asked for, and what they need is not installed; or requests are to be captured where
            nothing can be written.
    """
    listeners: list[TelemetryListener] = []
    if config.otlp_endpoint is not None:
        # Before the log, whose lines name the trace.
        listeners.append(_spans(config.otlp_endpoint, config.trace_ratio))
    if config.log_calls:
        listeners.append(CallLog(decode if config.log_texts else None))
    if config.capture_dir is not None:
        listeners.append(Capture(config.capture_dir, config.capture_bytes, prompts=config.capture_prompts))
    return Observer(listeners, keeps_text=config.log_texts)


def _spans(endpoint: str, ratio: float) -> TelemetryListener:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from server.telemetry.spans import Spans
    except ImportError as error:
        raise ConfigError(
            f"server.otlp_endpoint: traces need packages that are not here ({error.name}); "
            "install them with: pip install 'specdec[otel]', or leave otlp_endpoint out"
        ) from None
    return Spans(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https")), ratio)
