"""Metrics as Prometheus scrapes them: under specdec's names and, where asked for, under vLLM's."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.engine_client import EngineClient
from server.engine_supervisor import EngineState
from server.interfaces import KvEventCounts
from server.observe.gpus import Gpus, GpuUse
from server.observe.metrics import Histogram, ServerMetrics
from specdec.core.types import EngineInfo, EngineLoad, FinishReason

Labels = Mapping[str, str]


def counter(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """One number that only grows; ``_total`` is added to the name."""
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(name: str, text: str, label_names: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    """Numbers that only grow; keys are tuples, the values of the labels."""
    family = CounterMetricFamily(name, text, labels=list(label_names))
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family


def gauge(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """One number as it is now."""
    labels = labels or {}
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, values: Histogram, labels: Labels | None = None) -> Metric:
    """A distribution."""
    labels = labels or {}
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), values.buckets(), values.total)
    return family


def histograms(name: str, text: str, label_names: tuple[str, ...], values: Mapping[Any, Histogram]) -> Metric:
    """Distributions; keys are tuples, the values of the labels."""
    family = HistogramMetricFamily(name, text, labels=list(label_names))
    for labels, found in values.items():
        family.add_metric(list(labels), found.buckets(), found.total)
    return family


def summary(name: str, text: str, count: int, total: float) -> Metric:
    """How many values there were, and their sum."""
    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``load`` is the engine's last word, up to a second old. ``info`` None: it has not been ready yet."""

    metrics: ServerMetrics
    load: EngineLoad
    info: EngineInfo | None
    ready: bool
    restarts: int
    in_flight: int


SPECDEC_PREFIX = "specdec_"
STEP_ROWS_TOP, BATCH_TOP = 12, 8  # powers of two: the most that the configuration allows


def model_families(now: Snapshot) -> Iterator[Metric]:
    """Every family of a model; docs/operations.md lists them."""
    yield from _engine(now)
    yield from _steps(now)
    yield from _requests(now)
    yield from _tokens(now)
    yield from _speculation(now)
    yield from _latencies(now)
    yield from _arms(now)


def _engine(now: Snapshot) -> Iterator[Metric]:
    load = now.load
    yield gauge(SPECDEC_PREFIX + "engine_ready", "1 while the engine takes requests.", now.ready)
    yield counter(SPECDEC_PREFIX + "engine_restarts", "Times the engine's process was started again.", now.restarts)
    yield gauge(SPECDEC_PREFIX + "requests_running", "Requests that the engine works on.", load.running_requests)
    yield gauge(SPECDEC_PREFIX + "requests_waiting", "Requests that the engine has queued.", load.waiting_requests)
    yield gauge(SPECDEC_PREFIX + "requests_in_flight", "Requests given to the engine and not ended.", now.in_flight)
    yield gauge(SPECDEC_PREFIX + "tokens_per_second", "Tokens emitted, a mean that decays.", load.tokens_per_second)
    yield gauge(SPECDEC_PREFIX + "kv_pages", "Pages of the KV cache.", load.total_pages)
    yield gauge(
        SPECDEC_PREFIX + "kv_pages_used", "Pages that running requests hold.", load.total_pages - load.free_pages
    )
    yield gauge(SPECDEC_PREFIX + "kv_usage_ratio", "Part of the KV pages in use.", now.load.kv_usage)
    yield gauge(
        SPECDEC_PREFIX + "prefix_hit_ratio", "Part of all prompt tokens found in the prefix cache.", now.load.hit_rate
    )
    if now.info is not None:
        info = now.info
        labels = {
            "version": info.version, "target": info.target, "draft": info.draft or "", "dtype": info.dtype,
            "kv_dtype": info.kv_dtype, "kernels": info.kernels, "numeric_mode": info.numeric_mode,
            "drafters": ",".join(info.drafters),
        }  # fmt: skip
        yield gauge(SPECDEC_PREFIX + "info", "What is served.", 1, labels)


def _kv_events(counts: KvEventCounts) -> Iterator[Metric]:
    yield counter(SPECDEC_PREFIX + "kv_event_messages", "Messages of the KV cache published.", counts.messages)
    yield counter(
        SPECDEC_PREFIX + "kv_event_overflows", "Times a subscriber fell behind and misses messages.", counts.overflows
    )
    yield counter(SPECDEC_PREFIX + "kv_event_messages_replayed", "Messages sent again when asked for.", counts.replayed)


def _steps(now: Snapshot) -> Iterator[Metric]:
    load = now.load
    decisions = {("draft",): load.drafting_steps, ("plain",): load.steps - load.drafting_steps}
    yield counters(
        SPECDEC_PREFIX + "steps", "Engine steps, by whether any draft was verified.", ("decision",), decisions
    )
    whole_s = (load.plan_ms + load.draft_ms + load.verify_ms + load.commit_ms) / 1e3
    yield summary(SPECDEC_PREFIX + "step_seconds", "Time of an engine step.", load.steps, whole_s)
    phases = {
        ("plan",): load.plan_ms, ("draft",): load.draft_ms, ("verify",): load.verify_ms, ("commit",): load.commit_ms,
    }  # fmt: skip
    seconds = {phase: ms / 1e3 for phase, ms in phases.items()}
    yield counters(SPECDEC_PREFIX + "step_phase_seconds", "Time of engine steps, by part.", ("phase",), seconds)
    rows = Histogram.by_powers(load.steps_by_rows, STEP_ROWS_TOP, load.step_rows)
    yield histogram(SPECDEC_PREFIX + "step_rows", "Rows of a step's forward.", rows)
    sequences = Histogram.by_powers(load.steps_by_sequences, BATCH_TOP, load.step_sequences)
    yield histogram(SPECDEC_PREFIX + "batch_size", "Sequences of a step's forward.", sequences)
    yield counter(SPECDEC_PREFIX + "step_draft_rows", "Rows of all forwards that were draft tokens.", load.draft_rows)


def call_families(metrics: ServerMetrics) -> Iterator[Metric]:
    """Every family of calls, whichever model they were for."""
    yield gauge(SPECDEC_PREFIX + "calls_open", "Calls that are being answered.", metrics.calls_open)
    yield counters(
        SPECDEC_PREFIX + "calls",
        "Calls answered, by HTTP's or gRPC's status.",
        ("face", "endpoint", "status"),
        metrics.calls,
    )
    refusals = {(reason,): count for reason, count in metrics.refusals.items()}
    yield counters(SPECDEC_PREFIX + "refusals", "Calls refused or broken off, by cause.", ("reason",), refusals)
    errors = {(kind,): count for kind, count in metrics.file_errors.items()}
    text = "Failed reads and writes of the server's own files; a rejected file counts once per change."
    yield counters(SPECDEC_PREFIX + "file_errors", text, ("file",), errors)
    text = "A call from begin to end, whatever it asked for."
    yield histogram(SPECDEC_PREFIX + "call_seconds", text, metrics.call_time)


def _requests(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    requests = {(how,): count for how, count in metrics.requests.items()}
    yield counters(SPECDEC_PREFIX + "requests", "Requests to the engine, by how they ended.", ("outcome",), requests)
    yield counter(
        SPECDEC_PREFIX + "goodput_requests", "Requests complete within their objectives.", metrics.good_requests
    )
    missed = {(objective,): count for objective, count in metrics.missed.items()}
    yield counters(
        SPECDEC_PREFIX + "missed_objectives", "Complete requests, by the objective missed.", ("objective",), missed
    )
    finished = {(reason,): count for reason, count in metrics.finished.items()}
    yield counters(SPECDEC_PREFIX + "samples", "Samples that ended, by finish reason.", ("reason",), finished)
    yield counter(
        SPECDEC_PREFIX + "preemptions", "Times a sample gave up its pages for want of them.", metrics.preemptions
    )
    yield counter(
        SPECDEC_PREFIX + "pauses", "Times a prompt gave up its place while it was read, to another.", metrics.pauses
    )


def _tokens(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    yield counter(SPECDEC_PREFIX + "prompt_tokens", "Prompt tokens of scheduled requests.", metrics.prompt_tokens)
    yield counter(SPECDEC_PREFIX + "cached_tokens", "Those of them found in the prefix cache.", metrics.cached_tokens)
    yield counter(SPECDEC_PREFIX + "generation_tokens", "Tokens generated.", metrics.output_tokens)
    yield counter(
        SPECDEC_PREFIX + "goodput_tokens", "Those of requests complete within their objectives.", metrics.good_tokens
    )
    predictions = {("accepted",): metrics.prediction_accepted, ("rejected",): metrics.prediction_rejected}
    yield counters(SPECDEC_PREFIX + "prediction_tokens", "Tokens of predictions.", ("outcome",), predictions)
    forms = {(form,): samples for form, samples in metrics.inferred_predictions.items()}
    yield counters(
        SPECDEC_PREFIX + "inferred_predictions", "Samples predicted from a next-edit prompt.", ("form",), forms
    )
    yield histogram(SPECDEC_PREFIX + "request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt)
    yield histogram(SPECDEC_PREFIX + "sample_generation_tokens", "Tokens of a sample.", metrics.request_output)
    yield histogram(
        SPECDEC_PREFIX + "chunk_tokens", "Tokens that came at once, one chunk a step.", metrics.chunk_tokens
    )


def _speculation(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    steps = {("draft",): metrics.drafting_steps, ("plain",): metrics.steps - metrics.drafting_steps}
    yield counters(
        SPECDEC_PREFIX + "sample_steps", "Steps of samples, by whether drafts were verified.", ("decision",), steps
    )
    yield counter(SPECDEC_PREFIX + "draft_tokens", "Draft tokens verified.", metrics.drafted)
    yield counter(SPECDEC_PREFIX + "accepted_tokens", "Draft tokens accepted.", metrics.accepted)
    drafted = {(name,): part.num_draft_tokens for name, part in metrics.by_drafter.items()}
    accepted = {(name,): part.num_accepted_draft_tokens for name, part in metrics.by_drafter.items()}
    yield counters(
        SPECDEC_PREFIX + "drafter_draft_tokens", "Draft tokens verified, by who drafted.", ("drafter",), drafted
    )
    yield counters(
        SPECDEC_PREFIX + "drafter_accepted_tokens", "Draft tokens accepted, by drafter.", ("drafter",), accepted
    )
    positions = {(str(at),): count for at, count in enumerate(metrics.accepted_at)}
    yield counters(
        SPECDEC_PREFIX + "accepted_tokens_per_position", "Draft tokens accepted, by depth.", ("position",), positions
    )


def _latencies(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    for name, text, values in (
        ("time_to_first_token_seconds", "A call's begin to its first token.", metrics.ttft),
        ("inter_chunk_seconds", "Time between two chunks of a sample.", metrics.gap),
        ("time_per_output_token_seconds", "A sample's mean time per token after the first.", metrics.tpot),
        ("queue_seconds", "Time a request waited in the engine's queue.", metrics.queue),
        ("prefill_seconds", "A sample's first step to its first token.", metrics.prefill),
        ("decode_seconds", "A sample's first token to its end.", metrics.decode),
        ("request_seconds", "A complete request from its call's begin to its end.", metrics.e2e),
    ):
        yield histogram(SPECDEC_PREFIX + name, text, values)


def _arms(now: Snapshot) -> Iterator[Metric]:
    arms, names = now.metrics.arms, ("experiment", "arm")
    requests = {(*key, how): count for key, arm in arms.items() for how, count in arm.requests.items()}
    prefix, of = SPECDEC_PREFIX + "experiment_", "of an experiment's arm"
    yield counters(prefix + "requests", f"Requests {of}, by how they ended.", (*names, "outcome"), requests)
    for name, text, values in (
        (
            "time_to_first_token_seconds",
            f"A call's begin to its first token, {of}.",
            {k: a.ttft for k, a in arms.items()},
        ),
        (
            "time_per_output_token_seconds",
            f"A sample's mean time per token, {of}.",
            {k: a.tpot for k, a in arms.items()},
        ),
        ("request_seconds", f"A complete request from begin to end, {of}.", {k: a.e2e for k, a in arms.items()}),
    ):
        yield histograms(prefix + name, text, names, values)


def gpu_families(uses: Sequence[GpuUse]) -> Iterator[Metric]:
    """Of the machine's GPUs; none where there is none."""
    if not uses:
        return
    names = ("gpu", "uuid", "name")
    for name, text, value in (
        ("gpu_memory_bytes", "A GPU's memory.", lambda use: use.memory_total),
        ("gpu_memory_used_bytes", "What of it all processes hold.", lambda use: use.memory_used),
        ("gpu_utilization_ratio", "Part of the last moment in which the GPU ran a kernel.", lambda use: use.busy),
    ):
        family = GaugeMetricFamily(SPECDEC_PREFIX + name, text, labels=names)
        for use in uses:
            if (found := value(use)) is not None:
                family.add_metric((str(use.index), use.uuid, use.name), found)
        yield family


VLLM_PREFIX = "vllm:"
# vLLM knows few ends: whatever ended a text where it should is a stop.
_REASONS = {FinishReason.LENGTH: "length", FinishReason.TIME_LIMIT: "length", FinishReason.ABORTED: "abort",
            FinishReason.DEADLINE: "abort"}  # fmt: skip


def vllm_families(now: Snapshot, model: str = "") -> Iterator[Metric]:
    """Every family vLLM has and specdec can fill; none before the model's name is known."""
    if now.info is None:
        return
    labels = {"model_name": model or now.info.target, "engine": "0"}
    metrics, load = now.metrics, now.load
    for name, text, value in (
        ("num_requests_running", "Requests in model execution batches.", load.running_requests),
        ("num_requests_waiting", "Requests waiting to be processed.", load.waiting_requests),
        ("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", now.load.kv_usage),
        ("gpu_cache_usage_perc", "KV-cache usage under its former name.", now.load.kv_usage),
    ):
        yield gauge(VLLM_PREFIX + name, text, value, labels)
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
        yield counter(VLLM_PREFIX + name, text, value, labels)
    yield from _labelled(now, tuple(labels), tuple(labels.values()))
    for name, text, values in _histograms(metrics):
        yield histogram(VLLM_PREFIX + name, text, values, labels)


def _labelled(now: Snapshot, names: tuple[str, ...], own: tuple[str, ...]) -> Iterator[Metric]:
    """Families with one label more."""
    reasons: Counter[str] = Counter(stop=0, length=0, abort=0)
    for reason, count in now.metrics.finished.items():
        reasons[_REASONS.get(FinishReason(reason), "stop")] += count
    yield counters(
        VLLM_PREFIX + "request_success", "Requests that ended.", (*names, "finished_reason"),
        {(*own, reason): count for reason, count in reasons.items()},
    )  # fmt: skip
    yield counters(
        VLLM_PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.",
        (*names, "position"),
        {(*own, str(at)): count for at, count in enumerate(now.metrics.accepted_at)},
    )  # fmt: skip
    if now.info is not None and now.load.total_pages:
        cache = {
            "block_size": str(now.info.kv_tokens // now.load.total_pages),
            "num_gpu_blocks": str(now.load.total_pages),
            "cache_dtype": now.info.kv_dtype,
        }
        yield gauge(VLLM_PREFIX + "cache_config_info", "The KV cache.", 1, dict(zip(names, own, strict=True)) | cache)


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


Compat = Literal["none", "vllm"]


class Registry(Collector):
    """Return the exposition: the families of `collect`, this process's, and those of ``gpus``."""

    def __init__(self, compat: Compat = "none", gpus: Gpus | None = None) -> None:
        self._compat, self._gpus = compat, gpus
        self._gpu_uses: list[GpuUse] = []
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    async def render(self, accept: str) -> tuple[bytes, bytes]:
        """The exposition in the preferred format of the header ``accept``, and its media type.

        Plain text if vLLM's names are included: OpenMetrics allows no colon in names, and Prometheus 2 renames them.
        """
        encode, media_type = choose_encoder(accept)
        if self._compat == "vllm":
            encode, media_type = generate_latest, CONTENT_TYPE_PLAIN_0_0_4
        if self._gpus is not None:
            self._gpu_uses = await asyncio.to_thread(self._gpus.read)  # a driver may take its time
        return encode(self._registry), media_type.encode()


class Exporter(Registry):
    """A registry of its own over one model's metrics, its engine's load, and what that process uses.

    ``model``: what vLLM's names call it; empty: as its target.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        client: EngineClient,
        compat: Compat = "none",
        gpus: Gpus | None = None,
        model: str = "",
    ) -> None:
        self.metrics, self._client, self._model = metrics, client, model
        # No process: its files are not there, and the collector says nothing.
        self._process = ProcessCollector("specdec_engine", lambda: client.engine.pid or "none", registry=None)
        super().__init__(compat, gpus)

    def collect(self) -> Iterator[Metric]:
        """All families, at one moment."""
        yield from call_families(self.metrics)
        yield from self.families()
        yield from gpu_families(self._gpu_uses)

    def families(self) -> Iterator[Metric]:
        """Those of the model and its engine's process."""
        engine = self._client.engine
        info = engine.info if engine.is_known else None
        ready = engine.state == EngineState.READY
        now = Snapshot(self.metrics, engine.load, info, ready, engine.restarts, self._client.in_flight)
        yield from model_families(now)
        if engine.cache_feed is not None:
            yield from _kv_events(engine.cache_feed.counts)
        yield from self._process.collect()
        if self._compat == "vllm":
            yield from vllm_families(now, self._model)


class JointExporter(Registry):
    """A registry over ``calls`` and over the models of a server, by name, which the label ``model`` distinguishes."""

    def __init__(
        self, calls: ServerMetrics, models: Mapping[str, Exporter], compat: Compat = "none", gpus: Gpus | None = None
    ) -> None:
        self._calls, self._models = calls, models
        super().__init__(compat, gpus)

    def collect(self) -> Iterator[Metric]:
        """All families at one moment; each appears once, with the samples of every model."""
        found: dict[str, Metric] = {}
        for name, exporter in self._models.items():
            for family in exporter.families():
                joint = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                joint.samples += [sample._replace(labels={"model": name, **sample.labels}) for sample in family.samples]
        yield from call_families(self._calls)
        yield from found.values()
        yield from gpu_families(self._gpu_uses)
