"""The same metrics under the names vLLM has for them, so that its boards, scalers and routers work here too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from server.metrics.families import counter, counters, gauge, histogram
from server.metrics.histogram import Histogram
from server.metrics.server_metrics import ServerMetrics
from server.metrics.snapshot import Snapshot
from specdec.types import FinishReason

PREFIX = "vllm:"
# vLLM knows few ends: whatever ended a text where it should is a stop.
_REASONS = {FinishReason.LENGTH: "length", FinishReason.TIME_LIMIT: "length", FinishReason.ABORTED: "abort",
            FinishReason.DEADLINE: "abort"}  # fmt: skip


def vllm_families(now: Snapshot) -> Iterator[Metric]:
    """Every family vLLM has and specdec can fill; none before the model's name is known."""
    if now.info is None:
        return
    labels = {"model_name": now.info.target, "engine": "0"}
    metrics, load = now.metrics, now.load
    for name, text, value in (
        ("num_requests_running", "Requests in model execution batches.", load.running_requests),
        ("num_requests_waiting", "Requests waiting to be processed.", load.waiting_requests),
        ("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", now.kv_usage),
    ):
        yield gauge(PREFIX + name, text, value, labels)
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", metrics.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", metrics.cached_tokens),
        ("num_preemptions", "Preemptions.", metrics.preemptions),
        ("prompt_tokens", "Prefill tokens processed.", metrics.prompt_tokens),
        ("generation_tokens", "Generation tokens processed.", metrics.output_tokens),
        ("spec_decode_num_drafts", "Speculative steps.", metrics.drafting_steps),
        ("spec_decode_num_draft_tokens", "Draft tokens.", metrics.drafted),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", metrics.accepted),
    ):
        yield counter(PREFIX + name, text, value, labels)
    yield from _labelled(now, tuple(labels), tuple(labels.values()))
    for name, text, values in _histograms(metrics):
        yield histogram(PREFIX + name, text, values, labels)


def _labelled(now: Snapshot, names: tuple[str, ...], own: tuple[str, ...]) -> Iterator[Metric]:
    """Families with one label more."""
    reasons: Counter[str] = Counter(stop=0, length=0, abort=0)
    for reason, count in now.metrics.finished.items():
        reasons[_REASONS.get(FinishReason(reason), "stop")] += count
    yield counters(
        PREFIX + "request_success", "Requests that ended.", (*names, "finished_reason"),
        {(*own, reason): count for reason, count in reasons.items()},
    )  # fmt: skip
    yield counters(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", (*names, "position"),
        {(*own, str(at)): count for at, count in enumerate(now.metrics.accepted_at)},
    )  # fmt: skip
    if now.info is not None and now.load.total_pages:
        cache = {
            "block_size": str(now.info.kv_tokens // now.load.total_pages),
            "num_gpu_blocks": str(now.load.total_pages),
        }
        yield gauge(PREFIX + "cache_config_info", "The KV cache.", 1, dict(zip(names, own, strict=True)) | cache)


def _histograms(metrics: ServerMetrics) -> Iterator[tuple[str, str, Histogram]]:
    yield "time_to_first_token_seconds", "Time to first token.", metrics.ttft
    yield "inter_token_latency_seconds", "Time between outputs.", metrics.gap
    yield "request_time_per_output_token_seconds", "Mean time per output token.", metrics.tpot
    yield "e2e_request_latency_seconds", "End-to-end request latency.", metrics.e2e
    yield "request_queue_time_seconds", "Time in the queue.", metrics.queue
    yield "request_prefill_time_seconds", "Time in prefill.", metrics.prefill
    yield "request_decode_time_seconds", "Time in decode.", metrics.decode
    yield "request_inference_time_seconds", "Time in prefill and decode.", metrics.inference
    yield "request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt
    yield "request_generation_tokens", "Tokens generated for a request.", metrics.request_output
    yield "request_params_n", "Samples asked for.", metrics.request_samples
    yield "request_params_max_tokens", "Tokens asked for.", metrics.request_max_tokens
