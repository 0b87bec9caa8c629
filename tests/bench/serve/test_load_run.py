"""What the load generator measures of a server with known latencies, on a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bench.serve.load import RECENT, LoadRun, ServePlan, ServeReport, progress_line, report_tables, run_plan
from specdec.load.request import LoadRequest, Objective, Record, TimedRequest
from tests.bench.serve.fake_server import FakeServer
from tests.bench.virtual_loop import run_virtually


def asks(name: str = "a") -> itertools.repeat[LoadRequest]:
    return itertools.repeat(LoadRequest(name, 16, text="x"))


def evenly(count: int, every_s: float, name: str = "a") -> list[TimedRequest]:
    return [TimedRequest(i * every_s, LoadRequest(name, 16, text="x")) for i in range(count)]


def scheduled(server: FakeServer, schedule: list[TimedRequest], timeout_s: float = 120.0) -> LoadRun:
    run = LoadRun(server, timeout_s)
    run_virtually(run.on_schedule(schedule))
    return run


def in_turns(server: FakeServer, at_once: int, count: int | None, duration_s: float | None = None) -> LoadRun:
    run = LoadRun(server)
    run_virtually(run.in_turns(asks(), at_once, count, duration_s))
    return run


def test_figures_are_those_of_the_server() -> None:
    run = scheduled(FakeServer(first_s=0.2, gap_s=0.05, chunks=5, tokens=2), evenly(40, 0.1))
    report = ServeReport(run)
    figures = report.as_dict()
    latency = figures["latency"]
    assert report.faults() == []
    assert figures["valid"] is True
    assert latency["ttft_ms"]["p50"] == pytest.approx(200, abs=0.01) == latency["ttft_ms"]["max"]
    assert latency["inter_chunk_ms"]["p99"] == pytest.approx(50, abs=0.01)
    assert latency["inter_chunk_ms"]["n"] == 40 * 4
    assert latency["e2e_ms"]["mean"] == pytest.approx(400, abs=0.01)
    assert latency["tpot_ms"]["p50"] == pytest.approx(200 / 9, abs=0.01)
    assert latency["tokens_per_chunk"]["mean"] == 2
    assert figures["duration_s"] == pytest.approx(39 * 0.1 + 0.4)
    assert figures["throughput"]["output_tokens_per_s"] == pytest.approx(400 / 4.3, abs=0.01)
    assert figures["requests"] == {"planned": 40, "sent": 40, "ok": 40, "refused": 0, "failed": 0, "cut": 0}
    assert len(figures["each"]) == 40


@pytest.mark.parametrize("workload", ["humaneval", "shared-prefix"])
def test_bug_a_second_run_was_answered_from_the_texts_of_the_first(workload: str) -> None:
    class Remembers(FakeServer):
        asks: list[LoadRequest] = []  # noqa: RUF012 - of one test

        async def send(self, ask: LoadRequest, record: Record) -> None:
            self.asks.append(ask)
            await super().send(ask, record)

    server = Remembers()
    for _ in range(2):
        run_virtually(run_plan(ServePlan(workload, requests=20), server))
    first, second = server.asks[:24], server.asks[24:]
    assert [ask.text for ask in first] == [ask.text for ask in second]
    common = {ask.salt for ask in first} & {ask.salt for ask in second}
    assert common == ({""} if workload == "shared-prefix" else set())


def test_nobody_waits_for_answers_in_an_open_loop() -> None:
    server = FakeServer(first_s=50.0)
    scheduled(server, evenly(30, 0.1))
    assert server.most == 30
    assert [b - a for a, b in itertools.pairwise(server.sent_s)] == pytest.approx([0.1] * 29)


def test_what_a_stall_holds_up_is_counted() -> None:
    """Coordinated omission: a closed loop sees one slow answer, an open loop sees all."""
    stall = (1.0, 3.0)
    run = scheduled(FakeServer(first_s=0.01, gap_s=0.0, chunks=1, stall=stall), evenly(400, 0.01))
    late = [record for record in run.records if record.ttft_ms > 11]
    assert len(late) == pytest.approx(200, abs=1)
    for record in late:
        assert record.ttft_ms == pytest.approx((3.0 - record.due_s) * 1e3 + 10, abs=0.01)
    closed = in_turns(FakeServer(first_s=0.01, gap_s=0.0, chunks=1, stall=stall), 1, 400)
    assert sum(record.ttft_ms > 11 for record in closed.records) == 1


def test_a_queue_at_the_server_grows_in_the_figures() -> None:
    """One request at a time, 0.1 s each, arrivals every 0.05 s: request i starts at 0.1 i."""
    run = scheduled(FakeServer(first_s=0.1, gap_s=0.0, chunks=1, places=1), evenly(50, 0.05))
    assert [r.ttft_ms for r in run.records] == pytest.approx([(i + 1) * 100 - i * 50 for i in range(50)], abs=0.01)


def test_times_count_from_when_a_request_was_due() -> None:
    schedule = [TimedRequest(0.0, LoadRequest("blocks", 1, text="x")), TimedRequest(0.1, LoadRequest("a", 1, text="x"))]
    run = scheduled(FakeServer(first_s=0.2, chunks=1, block_s=0.5), schedule)
    blocked = run.records[1]
    assert blocked.slip_ms == pytest.approx(400)
    assert blocked.ttft_ms == pytest.approx(600)


@pytest.mark.parametrize(("block_s", "valid"), [(0.0, True), (0.05, False)])
def test_a_busy_generator_makes_the_run_invalid(block_s: float, valid: bool) -> None:
    report = ServeReport(scheduled(FakeServer(block_s=block_s), evenly(50, 0.02, "blocks")))
    assert report.as_dict()["valid"] is valid
    assert any("sent late" in fault for fault in report.faults()) is not valid


def test_a_busy_generator_is_noticed_in_a_closed_loop_too() -> None:
    run = LoadRun(FakeServer(block_s=0.05))
    run_virtually(run.in_turns(asks("blocks"), 4, 40, None))
    assert any("event loop" in fault and "lower the load" in fault for fault in ServeReport(run).faults())


def test_so_many_at_once_and_no_more() -> None:
    server = FakeServer()
    run = in_turns(server, 7, 50)
    assert server.most == 7
    assert len(run.records) == 50
    assert run.ended_s == pytest.approx(-(-50 // 7) * 0.4, abs=0.011)


def test_a_duration_ends_the_sending_and_not_the_answers() -> None:
    run = in_turns(FakeServer(), 3, None, duration_s=1.0)
    assert len(run.records) == 9
    assert all(record.ok for record in run.records)
    assert max(record.sent_s for record in run.records) < 1.0 < run.ended_s


def test_what_is_not_answered() -> None:
    names = ("refused", "failed", "hangs", "a")
    schedule = [TimedRequest(0.1 * i, LoadRequest(name, 4, text="x")) for i, name in enumerate(names)]
    report = ServeReport(scheduled(FakeServer(), schedule, timeout_s=5.0))
    figures = report.as_dict()
    assert [each["outcome"] for each in figures["each"]] == ["refused", "failed", "cut", "ok"]
    assert figures["refusals"] == {
        "n": 1, "with_retry_hint": 1, "retry_after_s": figures["refusals"]["retry_after_s"]
    }  # fmt: skip
    assert figures["refusals"]["retry_after_s"]["max"] == 0.75
    assert set(figures["errors"]) == {"full", "broken", "not finished within 5 s"}
    assert figures["latency"]["ttft_ms"]["n"] == 1  # only whole answers have latencies
    assert figures["goodput"]["share_of_sent"] == 0.25  # and what was not answered was not good


def test_errors_that_differ_in_numbers_are_counted_together() -> None:
    run = LoadRun(FakeServer())
    refusals = [f"RESOURCE_EXHAUSTED: done in about {n / 10} s, {n} tokens wait" for n in range(60, 80)]
    for error in (*refusals, "HTTP 503: sorry", "HTTP 500: sorry", "HTTP 503: sorry"):
        run.records.append(Record("a", 0.0, outcome="refused", error=error))
    assert ServeReport(run).as_dict()["errors"] == {refusals[0]: 20, "HTTP 503: sorry": 2, "HTTP 500: sorry": 1}


class Unread(list[Record]):
    """Records that only their number is read of."""

    def __iter__(self) -> Iterator[Record]:
        raise AssertionError("all records were read")


def test_a_progress_line_does_not_read_all_records() -> None:
    """Else the generator of a long run would be late twice a second, and the run invalid."""
    names = ("refused", "a", "failed", "a", "hangs")
    schedule = [TimedRequest(0.1 * i, LoadRequest(name, 4, text="x")) for i, name in enumerate(names)]
    run = scheduled(FakeServer(first_s=0.2, chunks=5, tokens=2), schedule, timeout_s=5.0)
    run.records = Unread([*run.records, Record("running", 0.0)])
    line = progress_line(run, run.started_s + 10)
    assert line == ("  10.0 s  sent 6/5  running 1  answered 2  not 3  2.0 tokens/s  TTFT p50 200 p99 200 ms")
    assert "TTFT -" in progress_line(LoadRun(FakeServer()), 1.0)


def test_a_progress_line_has_the_quantiles_of_the_last_answers() -> None:
    run = scheduled(FakeServer(first_s=0.2), evenly(RECENT + 2, 0.1))
    assert len(run.progress.recent_ttft_ms) == RECENT
    assert run.progress.answered == RECENT + 2


def test_who_is_refused_comes_back_after_the_hint() -> None:
    server = FakeServer()
    run_virtually(LoadRun(server).in_turns(asks("refused"), 1, 4, None))
    assert [b - a for a, b in itertools.pairwise(server.sent_s)] == pytest.approx([0.75] * 3)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ((), 1.0), (("ttft:201",), 1.0), (("ttft:199",), 0.0), (("tpot:23",), 1.0), (("tpot:22",), 0.0),
        (("itl:51", "e2e:401"), 1.0), (("itl:49",), 0.0), (("ttft:201", "e2e:399"), 0.0),
    ],
)  # fmt: skip
def test_goodput(limits: tuple[str, ...], share: float) -> None:
    run = scheduled(FakeServer(), evenly(10, 0.1))
    figures = ServeReport(run, objectives=[Objective.read(limit) for limit in limits]).as_dict()["goodput"]
    assert figures["share_of_sent"] == share
    assert figures["requests_per_s"] == pytest.approx(share * 10 / 1.3, abs=1e-3)


@pytest.mark.parametrize(("tokens", "chunks", "share"), [(None, 5, 0.0), (1, 1, 1.0), (None, 0, 1.0)])
def test_bug_texts_of_uncounted_tokens_keep_no_time_per_token(tokens: int | None, chunks: int, share: float) -> None:
    """A single token and an empty answer have none to keep."""
    run = scheduled(FakeServer(tokens=tokens, chunks=chunks), evenly(3, 0.1))
    figures = ServeReport(run, objectives=[Objective("tpot", 1e6)]).as_dict()["goodput"]
    assert figures["share_of_sent"] == share


def test_bug_an_answer_without_text_has_no_time_per_token() -> None:
    """Its tokens ended with the answer, as those held back for a stop string: it is not known how long each took."""
    silent = Record("a", 0.0, end_s=1.0, output_tokens=9)
    assert (silent.ttft_ms, silent.e2e_ms, silent.tpot_ms) == (1000.0, 1000.0, None)


def test_bug_a_server_that_reports_no_tokens_is_said_to() -> None:
    """As one does that ignores `stream_options`: 0 tokens per second, or per message, would be a false figure."""
    for tokens, said in ((None, True), (2, False)):
        latencies, totals = report_tables(ServeReport(scheduled(FakeServer(tokens=tokens), evenly(3, 0.1))))
        rows = dict(map(tuple, totals.rows))
        assert [("tokens" in rows), ("output tokens/s" not in rows)] == [said, said]
        assert next(row[1] for row in latencies.rows if row[0] == "tokens per message") == ("0" if said else "15")


def test_nothing_answered_is_no_result() -> None:
    report = ServeReport(scheduled(FakeServer(), evenly(5, 0.1, "failed")))
    assert report.faults() == ["no request was answered"]
