"""SGLang's /v1/loads, called as its gateway does."""

from __future__ import annotations

from datetime import datetime

import specdec
from tests.server.http.harness import COMPLETIONS, Server

GATEWAY = "/v1/loads?include=core,disagg,queues,memory"
WHOLE = {
    "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_waiting_uncached_tokens",
    "num_used_tokens", "num_total_tokens", "max_total_num_tokens", "max_running_requests",
}  # fmt: skip


def test_an_idle_server_reports_its_capacity(server: Server) -> None:
    answer = server.client.get(GATEWAY).json()
    assert datetime.fromisoformat(answer["timestamp"]).tzinfo is not None
    assert (answer["version"], answer["dp_rank_count"]) == (specdec.__version__, 1)
    (rank,) = answer["loads"]
    assert {name: rank[name] for name in ("num_running_reqs", "num_waiting_reqs", "max_running_requests")} == {
        "num_running_reqs": 0, "num_waiting_reqs": 0, "max_running_requests": 8,
    }  # fmt: skip
    assert rank["max_total_num_tokens"] == 4096
    assert all(isinstance(rank[name], int) for name in WHOLE)
    rates = ("token_usage", "gen_throughput", "cache_hit_rate", "utilization")
    assert all(isinstance(rank[name], float) for name in rates)
    assert rank["forecast_wait_s"] == 0
    assert rank["queues"]["waiting"] == 0


def test_the_answer_is_whole_whatever_is_asked_for(server: Server) -> None:
    (whole,), (core,) = (server.client.get(f"/v1/loads{query}").json()["loads"] for query in ("", "?include=core"))
    assert whole.keys() == core.keys() >= {*WHOLE, "queues"}


def test_running_requests_are_counted(server: Server) -> None:
    def counts() -> tuple[int, int]:
        (rank,) = server.client.get(GATEWAY).json()["loads"]
        return rank["num_running_reqs"], rank["num_waiting_reqs"]

    body = {"prompt": "x" * 60, "max_tokens": 60, "stream": True, "cache_salt": "slow"}
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert counts() == (1, 0)
    assert server.comes_to(lambda: counts() == (0, 0))
