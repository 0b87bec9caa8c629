"""/metrics of a running server: the numbers of real answers, under both names."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from tests.server.http.harness import COMPLETIONS, Server, running
from tests.server.observe.metrics.scrape import Scrape


@pytest.fixture
def server() -> Iterator[Server]:
    with running(metrics_compat="vllm") as found:
        yield found


def scrape(server: Server) -> Scrape:
    response = server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Scrape(response.text)


def test_counts_match_the_answers(server: Server) -> None:
    answers = [server.ask(prompt="hello", n=2), server.ask(prompt="some other text", max_tokens=4)]
    answers += [server.ask(prompt=["one", "three"], max_tokens=2)]
    found = scrape(server)
    usages = [answer["usage"] for answer in answers]
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    outputs = sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    samples = sum(len(answer["choices"]) for answer in answers)
    assert outputs > 0
    assert found.value("specdec_prompt_tokens_total") == prompts
    assert found.value("specdec_generation_tokens_total") == outputs
    assert found.value("specdec_cached_tokens_total") == cached
    assert found.value("specdec_requests_total", outcome="complete") == 4
    assert sum(found.by_label("specdec_samples_total", "reason").values()) == samples
    assert found.value("specdec_samples_total", reason="length") == samples
    # What the fake engine reports for every sample
    assert found.value("specdec_draft_tokens_total") == 6 * samples
    assert found.value("specdec_accepted_tokens_total") == 3 * samples
    assert found.by_label("specdec_drafter_draft_tokens_total", "drafter") == {"suffix": 4 * samples, "idle": 0}
    assert found.by_label("specdec_drafter_accepted_tokens_total", "drafter") == {"suffix": 3 * samples, "idle": 0}
    assert found.by_label("specdec_accepted_tokens_per_position_total", "position") == {"0": 2 * samples, "1": samples}
    assert found.by_label("specdec_sample_steps_total", "decision") == {"draft": 3 * samples, "plain": 2 * samples}
    for name in ("time_to_first_token_seconds", "queue_seconds", "request_seconds"):
        assert found.value(f"specdec_{name}_count") == 4
        assert 0 < found.value(f"specdec_{name}_sum") < 20
    # A call is over a moment after its client has read the last of it.
    done = {"endpoint": COMPLETIONS, "status": "200", "face": "http"}
    assert server.comes_to(lambda: scrape(server).value("specdec_calls_total", **done) == 3)


def test_vllms_metric_names_have_the_same_values(server: Server) -> None:
    server.ask(prompt="hello world", n=2)
    found = scrape(server)
    for theirs, ours in (
        ("prompt_tokens_total", "prompt_tokens_total"),
        ("generation_tokens_total", "generation_tokens_total"),
        ("prefix_cache_hits_total", "cached_tokens_total"),
        ("num_preemptions_total", "preemptions_total"),
        ("spec_decode_num_draft_tokens_total", "draft_tokens_total"),
        ("spec_decode_num_accepted_tokens_total", "accepted_tokens_total"),
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("kv_cache_usage_perc", "kv_usage_ratio"),
        ("gpu_cache_usage_perc", "kv_usage_ratio"),
        ("time_to_first_token_seconds_sum", "time_to_first_token_seconds_sum"),
        ("e2e_request_latency_seconds_count", "request_seconds_count"),
        ("inter_token_latency_seconds_count", "inter_chunk_seconds_count"),
    ):
        assert found.value(f"vllm:{theirs}", model_name="fake", engine="0") == found.value(f"specdec_{ours}")
    assert found.by_label("vllm:request_success_total", "finished_reason") == {"stop": 0, "length": 2, "abort": 0}
    assert found.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == 2
    with running() as plain:
        assert not [name for name in scrape(plain).names() if name.startswith("vllm:")]


def test_errors_and_unknown_paths_are_counted_by_cause(server: Server) -> None:
    server.refused(prompt="x", temperature=-1)
    server.refused(prompt="x", model="another")
    for path in ("/nowhere", "/else/where"):
        assert server.client.get(path).status_code == 404
    assert server.comes_to(lambda: sum(scrape(server).by_label("specdec_refusals_total", "reason").values()) == 4)
    found = scrape(server)
    reasons = found.by_label("specdec_refusals_total", "reason")
    assert reasons == {"INVALID_ARGUMENT": 1, "MODEL_NOT_FOUND": 1, "PATH_NOT_FOUND": 2}
    assert found.value("specdec_calls_total", endpoint="other", status="404") == 2


def test_a_path_with_a_parameter_is_one_endpoint(server: Server) -> None:
    for name in ("models", "v1", "1", "some/model"):
        server.client.get(f"/v1/models/{name}")
    counts = scrape(server).by_label("specdec_calls_total", "endpoint")
    assert counts["/v1/models/{model}"] == 4
    assert not [name for name in counts if "{" in name and name != "/v1/models/{model}"]


def test_a_disconnected_client_is_counted_with_its_output(server: Server) -> None:
    body = {"prompt": "x" * 100, "stream": True, "cache_salt": "slow"}
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        next(response.iter_lines())
    assert server.comes_to(lambda: scrape(server).value("specdec_requests_total", outcome="left") == 1)
    found = scrape(server)
    assert 0 < found.value("specdec_generation_tokens_total") < 100
    assert found.value("specdec_requests_in_flight") == 0
    assert found.value("specdec_request_seconds_count") == 0


def test_a_restarted_engine_keeps_the_counts_and_is_counted(server: Server) -> None:
    server.ask(prompt="hello")
    before = scrape(server)
    assert before.value("specdec_engine_ready") == 1
    assert before.value("specdec_engine_process_resident_memory_bytes") > 1 << 20
    pid = server.serving.client.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    # Without a process there are no figures of it, and a scrape still answers.
    assert server.comes_to(lambda: scrape(server).value("specdec_engine_restarts_total") == 1)
    assert server.comes_to(lambda: scrape(server).value("specdec_engine_ready") == 1)
    after = scrape(server)
    assert after.value("specdec_generation_tokens_total") == before.value("specdec_generation_tokens_total")


def test_every_format_has_the_same_names(server: Server) -> None:
    headers = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    with running() as plain:
        plain.ask(prompt="hello")
        response = plain.client.get("/metrics", headers=headers)
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        names = {sample.name for family in parse_openmetrics(response.text) for sample in family.samples}
        assert names == scrape(plain).names()
    # OpenMetrics has no colon in a name: otherwise Prometheus's preferred format would be skipped, or vLLM's names
    # would differ.
    server.ask(prompt="hello")
    response = server.client.get("/metrics", headers=headers)
    assert response.headers["content-type"].startswith("text/plain")
    assert "vllm:num_requests_waiting" in Scrape(response.text).names()


def test_a_scrape_does_not_grow_with_the_number_of_calls(server: Server) -> None:
    for _ in range(30):
        server.ask(prompt="hello")
    size = len(server.client.get("/metrics").content)
    for _ in range(30):
        server.ask(prompt="hello")
    assert len(server.client.get("/metrics").content) < size * 1.05


def test_scrapes_are_not_counted_as_requests(server: Server) -> None:
    for _ in range(3):
        httpx.get(f"{server.url}/metrics")
    assert server.comes_to(lambda: "/metrics" in scrape(server).by_label("specdec_calls_total", "endpoint"))
    found = scrape(server)
    assert found.value("specdec_calls_total", endpoint="/metrics") >= 3
    assert sum(found.by_label("specdec_requests_total", "outcome").values()) == 0
