"""Metrics for Prometheus, under specdec's names and, as an option, under vLLM's as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.engine_client import EngineClient
from server.observe.metrics import Histogram, ServerMetrics
from specdec.core.types import DRAFT_MODELS, POSITIONS, EngineInfo, EngineLoad, FinishReason, SpeculationStats

if TYPE_CHECKING:
    from server.kv_events import KvEventPublisher


Values = float | Mapping[Any, float]
Label = str | tuple[str, ...]


class Families:
    """Makes metric families whose names begin with ``prefix`` and whose samples all have ``labels``.

    Where a family has a label of its own, ``label`` is its name, or a tuple of names, and ``values`` maps its value, or
    a tuple of values, to the sample; otherwise ``values`` is the only sample.
    """

    def __init__(self, prefix: str, labels: Mapping[str, str] | None = None) -> None:
        self._prefix, self._labels = prefix, dict(labels or {})

    def gauge(self, name: str, text: str, values: Values, label: Label = ()) -> Metric:
        """Numbers that rise and fall."""
        return self._filled(GaugeMetricFamily, name, text, label, values)

    def info(self, name: str, text: str, labels: Mapping[str, str]) -> Metric:
        """Facts, as the labels of a sample of 1."""
        return self.gauge(name, text, {tuple(labels.values()): 1}, tuple(labels))

    def counter(self, name: str, text: str, values: Values, label: Label = ()) -> Metric:
        """Numbers that only grow; their name gets ``_total``."""
        return self._filled(CounterMetricFamily, name, text, label, values)

    def histogram(self, name: str, text: str, value: Histogram) -> Metric:
        """A distribution."""
        return self._filled(HistogramMetricFamily, name, text, (), {(): (value.buckets(), value.total)})

    def summary(self, name: str, text: str, count: int, total: float) -> Metric:
        """The number of values, and their sum."""
        return self._filled(SummaryMetricFamily, name, text, (), {(): (count, total)})

    def _filled(self, kind: Any, name: str, text: str, label: Label, values: Any) -> Metric:
        names = (label,) if isinstance(label, str) else label
        family: Any = kind(self._prefix + name, text, labels=(*self._labels, *names))
        for key, value in (values if isinstance(values, Mapping) else {(): values}).items():
            own = key if isinstance(key, tuple) else (key,)
            family.add_metric((*self._labels.values(), *own), *(value if isinstance(value, tuple) else (value,)))
        return family


STEP_ROWS_TOP, BATCH_TOP = 12, 8  # powers of two: the most that the configuration allows
_OURS = Families("specdec_")


def _engine(client: EngineClient, info: EngineInfo | None) -> Iterator[Metric]:
    engine, load = client.engine, client.engine.load
    yield _OURS.gauge("engine_ready", "1 while the engine accepts requests.", engine.is_ready)
    yield _OURS.counter("engine_restarts", "Restarts of the engine's process.", engine.restarts)
    yield _OURS.gauge("requests_running", "Requests that the engine is running.", load.running_requests)
    yield _OURS.gauge("requests_waiting", "Requests in the engine's queue.", load.waiting_requests)
    yield _OURS.gauge("requests_in_flight", "Requests sent to the engine that have not finished.", client.in_flight)
    yield _OURS.gauge("tokens_per_second", "Generated tokens per second, a decaying mean.", load.tokens_per_second)
    yield _OURS.gauge("kv_pages", "Pages of the KV cache.", load.total_pages)
    yield _OURS.gauge("kv_pages_used", "Pages that running requests hold.", load.total_pages - load.free_pages)
    yield _OURS.gauge("kv_usage_ratio", "Fraction of the KV pages in use.", load.kv_usage)
    yield _OURS.gauge("prefix_hit_ratio", "Fraction of all prompt tokens found in the prefix cache.", load.hit_rate)
    yield _OURS.gauge("kv_disk_bytes", "Bytes of the prefix cache on disk.", load.disk_bytes)
    pages = {"written": load.disk_pages_written, "read": load.disk_pages_read, **load.disk_pages_missed}
    yield _OURS.counter("kv_disk_pages", "Pages of the prefix cache on disk, by outcome.", pages, "outcome")
    if info is not None:
        labels = {
            "version": info.version, "target": info.target, "draft": info.draft or "", "dtype": info.dtype,
            "kv_dtype": info.kv_dtype, "kernels": info.kernels, "numeric_mode": info.numeric_mode,
            "drafters": ",".join(info.drafters),
        }  # fmt: skip
        yield _OURS.info("info", "The models and their numeric mode.", labels)


def _kv_events(feed: KvEventPublisher) -> Iterator[Metric]:
    yield _OURS.counter("kv_event_messages", "Published messages about the KV cache.", feed.messages)
    yield _OURS.counter("kv_event_overflows", "Times a slow subscriber lost messages.", feed.overflows)
    yield _OURS.counter("kv_event_messages_replayed", "Messages sent again on request.", feed.replayed)


def _steps(load: EngineLoad) -> Iterator[Metric]:
    decisions = {"draft": load.drafting_steps, "plain": load.steps - load.drafting_steps}
    yield _OURS.counter("steps", "Engine steps, by whether they verified drafts.", decisions, "decision")
    phases = {"plan": load.plan_ms, "draft": load.draft_ms, "verify": load.verify_ms, "commit": load.commit_ms}
    seconds = {phase: ms / 1e3 for phase, ms in phases.items()}
    yield _OURS.summary("step_seconds", "Duration of an engine step.", load.steps, sum(seconds.values()))
    yield _OURS.counter("step_phase_seconds", "Time of engine steps, by phase.", seconds, "phase")
    rows = Histogram.by_powers(load.steps_by_rows, STEP_ROWS_TOP, load.step_rows)
    yield _OURS.histogram("step_rows", "Rows of a step's forward.", rows)
    sequences = Histogram.by_powers(load.steps_by_sequences, BATCH_TOP, load.step_sequences)
    yield _OURS.histogram("batch_size", "Sequences of a step's forward.", sequences)
    yield _OURS.counter("step_draft_rows", "Draft tokens among the rows of all forwards.", load.draft_rows)


def call_families(metrics: ServerMetrics) -> Iterator[Metric]:
    """Every family of calls and of suggestions, of all models together."""
    yield _OURS.gauge("calls_open", "Calls in progress.", metrics.calls_open)
    labels = ("face", "endpoint", "status")
    yield _OURS.counter("calls", "Finished calls, by HTTP or gRPC status.", metrics.calls, labels)
    yield _OURS.counter("refusals", "Refused or aborted calls, by cause.", metrics.refusals, "reason")
    text = "Failed reads and writes of the server's own files; a rejected file counts once per change."
    yield _OURS.counter("file_errors", text, metrics.file_errors, "file")
    yield _OURS.histogram("call_seconds", "Duration of a call, of any kind.", metrics.call_time)
    yield _OURS.counter("suggestions", "Completions with a text, and predictions with an edit.", metrics.suggestions)
    text = "Outcomes of suggestions, as editors report them; a changed one counts again."
    yield _OURS.counter("suggestion_outcomes", text, metrics.suggestion_outcomes, "outcome")


def _requests(metrics: ServerMetrics) -> Iterator[Metric]:
    yield _OURS.counter("requests", "Finished requests to the engine, by outcome.", metrics.requests, "outcome")
    yield _OURS.counter("goodput_requests", "Requests completed within their objectives.", metrics.good_requests)
    text = "Completed requests that missed an objective, by objective."
    yield _OURS.counter("missed_objectives", text, metrics.missed, "objective")
    yield _OURS.counter("samples", "Finished samples, by finish reason.", metrics.finished, "reason")
    yield _OURS.counter("preemptions", "Samples preempted because the KV cache was full.", metrics.preemptions)
    yield _OURS.counter("pauses", "Prefills paused for another request.", metrics.pauses)


def _tokens(metrics: ServerMetrics) -> Iterator[Metric]:
    yield _OURS.counter("prompt_tokens", "Prompt tokens of scheduled requests.", metrics.prompt_tokens)
    yield _OURS.counter("cached_tokens", "Prompt tokens found in the prefix cache.", metrics.cached_tokens)
    yield _OURS.counter("generation_tokens", "Generated tokens.", metrics.output_tokens)
    text = "Generated tokens of requests completed within their objectives."
    yield _OURS.counter("goodput_tokens", text, metrics.good_tokens)
    predictions = {"accepted": metrics.prediction_accepted, "rejected": metrics.prediction_rejected}
    yield _OURS.counter("prediction_tokens", "Tokens of predicted outputs, by outcome.", predictions, "outcome")
    yield _OURS.histogram("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt)
    yield _OURS.histogram("sample_generation_tokens", "Generated tokens of a sample.", metrics.request_output)
    yield _OURS.histogram("chunk_tokens", "Tokens that a sample gets from one step.", metrics.chunk_tokens)


def _speculation(metrics: ServerMetrics, info: EngineInfo | None) -> Iterator[Metric]:
    stats = metrics.stats
    steps = {"draft": stats.num_spec_steps, "plain": stats.num_steps - stats.num_spec_steps}
    yield _OURS.counter("sample_steps", "Steps of samples, by whether drafts were verified.", steps, "decision")
    yield _OURS.counter("draft_tokens", "Verified draft tokens.", stats.num_draft_tokens)
    yield _OURS.counter("accepted_tokens", "Accepted draft tokens.", stats.num_accepted_draft_tokens)
    drafted = {name: part.num_draft_tokens for name, part in stats.by_drafter.items()}
    accepted = {name: part.num_accepted_draft_tokens for name, part in stats.by_drafter.items()}
    yield _OURS.counter("drafter_draft_tokens", "Verified draft tokens, by drafter.", drafted, "drafter")
    yield _OURS.counter("drafter_accepted_tokens", "Accepted draft tokens, by drafter.", accepted, "drafter")
    text, positions = "Accepted draft tokens, by depth.", by_position(stats)
    yield _OURS.counter("accepted_tokens_per_position", text, positions, "position")
    for what in ("proposed", "accepted"):
        counts = {
            (name, str(at)): count
            for name in _WITH_MODEL
            if name in stats.by_drafter
            for at, count in enumerate(getattr(stats.by_drafter[name], f"{what}_at"), 1)
        }
        text = f"Trees with a token of a drafter with a model that was {what}, by depth from 1."
        yield _OURS.counter(f"drafter_{what}_per_position", text, counts, ("drafter", "position"))
    card = info.head_acceptance[:POSITIONS] if info is not None else ()
    shares = {("head", str(at)): share for at, share in enumerate(card, 1)}
    text = "Accepted fraction of a drafter's proposals as its publisher measured it, by depth from 1."
    yield _OURS.gauge("drafter_card_acceptance_ratio", text, shares, ("drafter", "position"))


_WITH_MODEL = ("head", *DRAFT_MODELS)


def by_position(stats: SpeculationStats) -> dict[str, int]:
    """By k: steps that accepted more than k draft tokens."""
    above = [*accumulate(reversed(stats.acceptance_histogram[1:]))][::-1]
    return {str(position): count for position, count in enumerate(above)}


def _latencies(metrics: ServerMetrics) -> Iterator[Metric]:
    for name, text, values in (
        ("time_to_first_token_seconds", "Start of a call to its first token.", metrics.ttft),
        ("inter_chunk_seconds", "Time between two chunks of a sample.", metrics.gap),
        ("time_per_output_token_seconds", "Mean time per token of a sample, after the first.", metrics.tpot),
        ("queue_seconds", "Time of a request in the engine's queue.", metrics.queue),
        ("prefill_seconds", "First step of a sample to its first token.", metrics.prefill),
        ("decode_seconds", "First token of a sample to its end.", metrics.decode),
        ("request_seconds", "Start of a call to the end of its completed request.", metrics.e2e),
    ):
        yield _OURS.histogram(name, text, values)


# vLLM has few finish reasons: a text that ended where it should is a stop.
_VLLM_REASONS = {FinishReason.LENGTH: "length", FinishReason.TIME_LIMIT: "length", FinishReason.ABORTED: "abort",
                 FinishReason.DEADLINE: "abort"}  # fmt: skip


def vllm_families(metrics: ServerMetrics, load: EngineLoad, info: EngineInfo, model: str) -> Iterator[Metric]:
    """Every family of vLLM that specdec can fill."""
    vllm = Families("vllm:", {"model_name": model, "engine": "0"})
    for name, text, value in (
        ("num_requests_running", "Requests in model execution batches.", load.running_requests),
        ("num_requests_waiting", "Requests waiting to be processed.", load.waiting_requests),
        ("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", load.kv_usage),
        ("gpu_cache_usage_perc", "KV-cache usage under its former name.", load.kv_usage),
    ):
        yield vllm.gauge(name, text, value)
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", metrics.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", metrics.cached_tokens),
        ("num_preemptions", "Preemptions.", metrics.preemptions),
        ("prompt_tokens", "Prefill tokens processed.", metrics.prompt_tokens),
        ("generation_tokens", "Generation tokens processed.", metrics.output_tokens),
        ("spec_decode_num_drafts", "Speculative steps.", metrics.stats.num_spec_steps),
        ("spec_decode_num_draft_tokens", "Draft tokens.", metrics.stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Accepted draft tokens.", metrics.stats.num_accepted_draft_tokens),
    ):
        yield vllm.counter(name, text, value)
    reasons: Counter[str] = Counter(stop=0, length=0, abort=0)
    for reason, count in metrics.finished.items():
        reasons[_VLLM_REASONS.get(FinishReason(reason), "stop")] += count
    yield vllm.counter("request_success", "Requests that ended.", reasons, "finished_reason")
    text, positions = "Accepted draft tokens by position.", by_position(metrics.stats)
    yield vllm.counter("spec_decode_num_accepted_tokens_per_pos", text, positions, "position")
    if load.total_pages:
        cache = {
            "block_size": str(info.kv_tokens // load.total_pages),
            "num_gpu_blocks": str(load.total_pages),
            "cache_dtype": info.kv_dtype,
        }
        yield vllm.info("cache_config_info", "The KV cache.", cache)
    for name, text, values in (
        ("time_to_first_token_seconds", "Time to first token.", metrics.ttft),
        ("inter_token_latency_seconds", "Time between outputs.", metrics.gap),
        ("request_time_per_output_token_seconds", "Mean time per output token.", metrics.tpot),
        ("e2e_request_latency_seconds", "End-to-end request latency.", metrics.e2e),
        ("request_queue_time_seconds", "Time in the queue.", metrics.queue),
        ("request_prefill_time_seconds", "Time in prefill.", metrics.prefill),
        ("request_decode_time_seconds", "Time in decode.", metrics.decode),
        ("request_inference_time_seconds", "Time in prefill and decode.", metrics.inference),
        ("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt),
        ("request_generation_tokens", "Tokens generated for a request.", metrics.request_output),
        ("request_params_n", "Requested samples.", metrics.request_samples),
        ("request_params_max_tokens", "Requested tokens.", metrics.request_max_tokens),
    ):
        yield vllm.histogram(name, text, values)


Compat = Literal["none", "vllm"]


class ModelMetrics:
    """The metrics of one model, its engine's load, and the resources of the engine's process.

    name: the model's name in the configuration of several models, also vLLM's label ``model_name``. Empty: there is
    one model, and vLLM's label is the target's name.
    """

    def __init__(self, metrics: ServerMetrics, client: EngineClient, compat: Compat = "none", name: str = "") -> None:
        self._metrics, self._client, self._compat, self.name = metrics, client, compat, name
        # Without a process the collector finds no files and returns no family.
        self._process = ProcessCollector("specdec_engine", lambda: client.engine.pid or "none", registry=None)

    def families(self) -> Iterator[Metric]:
        """All families at one moment; docs/operations.md lists them."""
        engine, metrics = self._client.engine, self._metrics
        info = engine.info if engine.is_known else None  # None until the engine has been ready once
        yield from _engine(self._client, info)
        yield from _steps(engine.load)
        yield from _requests(metrics)
        yield from _tokens(metrics)
        yield from _speculation(metrics, info)
        yield from _latencies(metrics)
        if engine.cache_feed is not None:
            yield from _kv_events(engine.cache_feed)
        yield from self._process.collect()
        if self._compat == "vllm" and info is not None:
            yield from vllm_families(metrics, engine.load, info, self.name or info.target)


class Exporter(Collector):
    """The metrics of a server's calls, of its models, and of this process. The label ``model`` has a model's name."""

    def __init__(self, calls: ServerMetrics, models: Sequence[ModelMetrics], compat: Compat = "none") -> None:
        self._calls, self._models, self._compat = calls, models, compat
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, bytes]:
        """The exposition in the preferred format of the header ``accept``, and its media type.

        Plain text if vLLM's names are included: OpenMetrics allows no colon in names, and Prometheus 2 renames them.
        """
        encode, media_type = choose_encoder(accept)
        if self._compat == "vllm":
            encode, media_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        return encode(self._registry), media_type.encode()

    def collect(self) -> Iterator[Metric]:
        """All families at one moment, each once with the samples of every model."""
        found: dict[str, Metric] = {}
        for model in self._models:
            label = {"model": model.name} if model.name else {}
            for family in model.families():
                joint = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                joint.samples += [sample._replace(labels={**label, **sample.labels}) for sample in family.samples]
        yield from call_families(self._calls)
        yield from found.values()
