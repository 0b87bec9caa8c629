"""The metrics under specdec's names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from server.metrics.families import counter, counters, gauge, histogram, histograms, summary
from server.metrics.snapshot import Snapshot

PREFIX = "specdec:"


def own_families(now: Snapshot) -> Iterator[Metric]:
    """Every family; docs/operations.md lists them."""
    yield from _engine(now)
    yield from _steps(now)
    yield from _calls(now)
    yield from _tokens(now)
    yield from _speculation(now)
    yield from _latencies(now)
    yield from _arms(now)


def _engine(now: Snapshot) -> Iterator[Metric]:
    load = now.load
    yield gauge(PREFIX + "engine_ready", "1 while the engine takes requests.", now.ready)
    yield counter(PREFIX + "engine_restarts", "Times the engine's process was started again.", now.restarts)
    yield gauge(PREFIX + "requests_running", "Requests that the engine works on.", load.running_requests)
    yield gauge(PREFIX + "requests_waiting", "Requests that the engine has queued.", load.waiting_requests)
    yield gauge(PREFIX + "requests_in_flight", "Requests given to the engine and not ended.", now.in_flight)
    yield gauge(PREFIX + "tokens_per_second", "Tokens emitted, a mean that decays.", load.tokens_per_second)
    yield gauge(PREFIX + "kv_pages", "Pages of the KV cache.", load.total_pages)
    yield gauge(PREFIX + "kv_pages_used", "Pages that running requests hold.", load.total_pages - load.free_pages)
    yield gauge(PREFIX + "kv_usage_ratio", "Part of the KV pages in use.", now.kv_usage)
    yield gauge(PREFIX + "prefix_hit_ratio", "Part of all prompt tokens found in the prefix cache.", now.hit_rate)
    if now.info is not None:
        info = now.info
        labels = {
            "version": info.version, "target": info.target, "draft": info.draft or "", "dtype": info.dtype,
            "kernels": info.kernels, "numeric_mode": info.numeric_mode, "drafters": ",".join(info.drafters),
        }  # fmt: skip
        yield gauge(PREFIX + "info", "What is served.", 1, labels)


def _steps(now: Snapshot) -> Iterator[Metric]:
    load = now.load
    decisions = {("draft",): load.drafting_steps, ("plain",): load.steps - load.drafting_steps}
    yield counters(PREFIX + "steps", "Engine steps, by whether any draft was verified.", ("decision",), decisions)
    whole_s = (load.plan_ms + load.draft_ms + load.verify_ms + load.commit_ms) / 1e3
    yield summary(PREFIX + "step_seconds", "Time of an engine step.", load.steps, whole_s)
    phases = {
        ("plan",): load.plan_ms, ("draft",): load.draft_ms, ("verify",): load.verify_ms, ("commit",): load.commit_ms,
    }  # fmt: skip
    seconds = {phase: ms / 1e3 for phase, ms in phases.items()}
    yield counters(PREFIX + "step_phase_seconds", "Time of engine steps, by part.", ("phase",), seconds)
    yield summary(PREFIX + "step_rows", "Rows of a step's forward.", load.steps, load.step_rows)
    yield counter(PREFIX + "step_draft_rows", "Rows of all forwards that were draft tokens.", load.draft_rows)


def _calls(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    yield gauge(PREFIX + "calls_open", "Calls that are being answered.", metrics.calls_open)
    yield counters(
        PREFIX + "calls", "Calls answered, by HTTP's or gRPC's status.", ("face", "endpoint", "status"), metrics.calls
    )
    refusals = {(reason,): count for reason, count in metrics.refusals.items()}
    yield counters(PREFIX + "refusals", "Calls refused or broken off, by cause.", ("reason",), refusals)
    requests = {(how,): count for how, count in metrics.requests.items()}
    yield counters(PREFIX + "requests", "Requests to the engine, by how they ended.", ("outcome",), requests)
    finished = {(reason,): count for reason, count in metrics.finished.items()}
    yield counters(PREFIX + "samples", "Samples that ended, by finish reason.", ("reason",), finished)
    yield counter(
        PREFIX + "preemptions", "Times a sample gave up its pages and was computed again.", metrics.preemptions
    )


def _tokens(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    yield counter(PREFIX + "prompt_tokens", "Prompt tokens of scheduled requests.", metrics.prompt_tokens)
    yield counter(PREFIX + "cached_tokens", "Those of them found in the prefix cache.", metrics.cached_tokens)
    yield counter(PREFIX + "generation_tokens", "Tokens generated.", metrics.output_tokens)
    predictions = {("accepted",): metrics.prediction_accepted, ("rejected",): metrics.prediction_rejected}
    yield counters(PREFIX + "prediction_tokens", "Tokens of callers' predictions.", ("outcome",), predictions)
    yield histogram(PREFIX + "request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt)
    yield histogram(PREFIX + "sample_generation_tokens", "Tokens of a sample.", metrics.request_output)
    yield histogram(PREFIX + "chunk_tokens", "Tokens that came at once, one chunk a step.", metrics.chunk_tokens)


def _speculation(now: Snapshot) -> Iterator[Metric]:
    metrics = now.metrics
    steps = {("draft",): metrics.drafting_steps, ("plain",): metrics.steps - metrics.drafting_steps}
    yield counters(PREFIX + "sample_steps", "Steps of samples, by whether drafts were verified.", ("decision",), steps)
    yield counter(PREFIX + "draft_tokens", "Draft tokens verified.", metrics.drafted)
    yield counter(PREFIX + "accepted_tokens", "Draft tokens accepted.", metrics.accepted)
    drafted = {(name,): part.num_draft_tokens for name, part in metrics.by_drafter.items()}
    accepted = {(name,): part.num_accepted_draft_tokens for name, part in metrics.by_drafter.items()}
    yield counters(PREFIX + "drafter_draft_tokens", "Draft tokens verified, by who drafted.", ("drafter",), drafted)
    yield counters(PREFIX + "drafter_accepted_tokens", "Draft tokens accepted, by drafter.", ("drafter",), accepted)
    positions = {(str(at),): count for at, count in enumerate(metrics.accepted_at)}
    yield counters(
        PREFIX + "accepted_tokens_per_position", "Draft tokens accepted, by depth.", ("position",), positions
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
        ("call_seconds", "A call from begin to end, whatever it asked for.", metrics.call_time),
    ):
        yield histogram(PREFIX + name, text, values)


def _arms(now: Snapshot) -> Iterator[Metric]:
    arms, names = now.metrics.arms, ("experiment", "arm")
    requests = {(*key, how): count for key, arm in arms.items() for how, count in arm.requests.items()}
    prefix, of = PREFIX + "experiment_", "of an experiment's arm"
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
