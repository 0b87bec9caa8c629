"""A paired run: records, end, verdict, and resumption after an interruption."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.experiment.run_folder import Progress
from server.experiment.analysis.power import plan_size
from server.experiment.config import Stopping
from server.experiment.folder import ExperimentFolder
from server.experiment.records import ExperimentError, Record, RecordWriter
from specdec.cli.ab import progress_line
from specdec.load.request import LoadRequest
from tests.bench.experiment.fake_arm import TOKENS, FakeArm, KilledError, lognormal, prompt_of
from tests.bench.experiment.plays import logged, plan, play, result

NOISE = 0.1


def noisy(arm: str, factor: float = 1.0) -> FakeArm:
    """Latency by prompt, equal in both arms, with independent noise per arm."""
    return FakeArm(lambda ask: 0.2 * factor * lognormal(0.6, prompt_of(ask)) * lognormal(NOISE, arm, ask.salt))


def test_records_say_what_was_seen(tmp_path: Path) -> None:
    a, b = FakeArm(lambda ask: 0.2), FakeArm(lambda ask: 0.1)
    shown: list[Progress] = []
    why = play(tmp_path, plan(warmup_requests=2), a, b, shown=shown)
    assert why == "all planned requests were sent"
    records = logged(tmp_path).records
    assert len(records) == 2 * (2 + 20) == len(a.asked) + len(b.asked)
    assert sum(record.warm_up for record in records) == 4
    assert len({record.request for record in records}) == len(records)
    for record in records:
        took = 0.2 if record.arm == "off" else 0.1
        assert record.end is not None
        assert record.first_token is not None
        assert record.started is not None
        assert record.end - record.arrival == pytest.approx(took)
        assert record.first_token - record.arrival == pytest.approx(took / 10)
        assert record.started - record.arrival == pytest.approx(0.001)
        assert (record.tokens, record.accepted) == (TOKENS, (2, 1))
        assert (record.status, record.scheduled) == ("ok", None)
    found = result(tmp_path)
    assert (found.compared_outputs, found.mismatched_outputs) == (20, 0)
    assert found.verdict.kind == "better"
    assert found.primary.ratio == pytest.approx(0.5)
    line = progress_line(shown[-1], 3.0)
    assert "pairs 20/20" in line
    assert "ratio 0.500" in line


def test_one_request_at_a_time_and_both_arms_the_same(tmp_path: Path) -> None:
    a, b = noisy("a"), noisy("b")
    play(tmp_path, plan(), a, b)
    assert [(prompt_of(x), x.seed) for _, x in a.asked] == [(prompt_of(x), x.seed) for _, x in b.asked]
    spans = sorted((r.arrival, r.end or 0.0) for r in logged(tmp_path).records)
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(spans))


def test_turns_of_opposite_order(tmp_path: Path) -> None:
    play(tmp_path, plan(), FakeArm(), FakeArm())
    order = [r.arm for r in sorted(logged(tmp_path).records, key=lambda r: r.arrival)]
    pairs = [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]
    assert all(set(pairs[i : i + 2]) == {("off", "auto"), ("auto", "off")} for i in range(0, len(pairs), 2))


def test_arrival_times_are_those_of_the_schedule_in_both_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.experiment.config.OPEN_TURN", 5)
    slow = FakeArm(lambda ask: 3.0)
    play(tmp_path, plan(load={"workload": "chat", "rate": 10.0}), slow, FakeArm())
    records = logged(tmp_path).records
    offsets: dict[str, list[float]] = {}
    for turn in range(4):
        for arm in ("off", "auto"):
            part = [r for r in records if r.arm == arm and turn * 5 <= int(r.pair) < turn * 5 + 5]
            first = min(r.arrival for r in part)
            offsets.setdefault(arm, []).extend(r.arrival - first for r in part)
    assert offsets["off"] == pytest.approx(offsets["auto"], abs=1e-9)
    assert all(r.scheduled == pytest.approx(r.arrival, abs=1e-9) for r in records)
    assert max(offsets["off"]) > 0.1


def test_an_arm_sends_what_its_options_say(tmp_path: Path) -> None:
    arms = {"with": {}, "without": {"request": {"prediction": False, "session": False}}}
    a, b = FakeArm(), FakeArm()
    play(tmp_path, plan(arms=arms, load={"workload": "edit"}), a, b)
    assert all(ask.prediction for _, ask in a.asked)
    assert not any(ask.prediction or ask.session for _, ask in b.asked)


@pytest.mark.parametrize("by_ids", [True, False])
def test_other_tokens_in_one_arm_are_counted_and_make_it_invalid(tmp_path: Path, by_ids: bool) -> None:
    wrong = FakeArm(wrong=lambda ask: ask.name.endswith("7"))
    play(tmp_path, plan(), FakeArm(), wrong, by_ids=by_ids)
    found = result(tmp_path)
    assert (found.compared_outputs, found.mismatched_outputs) == (20, 2)
    assert found.verdict.kind == "invalid"
    assert "000007" in found.verdict.headline


def test_failures_are_recorded(tmp_path: Path) -> None:
    play(tmp_path, plan(), FakeArm(), FakeArm(fails=lambda ask: int(ask.name) % 2 == 0))
    failed = [r for r in logged(tmp_path).records if not r.ok]
    assert [(r.arm, r.status, r.error, r.token_hash) for r in failed] == [("auto", "FAILED", "broken", b"")] * 10
    assert result(tmp_path).arms[1].failed == 10


def test_servers_that_are_gone_end_the_run(tmp_path: Path) -> None:
    gone = {"fails": lambda ask: int(ask.name) >= 6}
    with pytest.raises(ExperimentError, match=r"the servers no longer answer .broken.*same command"):
        play(tmp_path, plan(), FakeArm(**gone), FakeArm(**gone))  # type: ignore[arg-type]
    assert len(logged(tmp_path).records) == 2 * 9


def test_time_ends_it(tmp_path: Path) -> None:
    why = play(tmp_path, plan(stopping={"max_duration": "3s"}), FakeArm(), FakeArm())
    assert why == "3 s have passed"
    assert len(logged(tmp_path).records) == 2 * 8  # 0.4 s each


def test_certainty_ends_it_early(tmp_path: Path) -> None:
    stopping = {"rule": "always_valid", "max_requests": 2000, "min_units": 20, "expected_units": 100}
    why = play(tmp_path, plan(stopping=stopping, guardrails=[]), noisy("a"), noisy("b", 0.4))
    assert why == "the verdict is certain: better"
    assert 40 <= len(logged(tmp_path).records) < 1000
    assert result(tmp_path).verdict.kind == "better"


@pytest.mark.parametrize(
    ("limit", "why"), [("1%", "all planned requests were sent"), ("50%", "the verdict is certain: better")]
)
def test_an_open_guardrail_keeps_it_going(tmp_path: Path, limit: str, why: str) -> None:
    stopping = {"rule": "always_valid", "max_requests": 120, "min_units": 20, "expected_units": 100}
    config = plan(stopping=stopping, guardrails=[{"metric": "error_rate", "max_increase": limit}])
    assert play(tmp_path, config, noisy("a"), noisy("b", 0.4)) == why
    assert result(tmp_path).guardrails[0].state == ("open" if limit == "1%" else "held")


def test_bug_many_at_once_are_no_wrong_shares(tmp_path: Path) -> None:
    """A turn sends 64 requests to one arm, then to the other."""
    stopping = {"rule": "always_valid", "max_requests": 256}
    config = plan(load={"workload": "chat", "concurrency": 64}, stopping=stopping, guardrails=[])
    play(tmp_path, config, noisy("a"), noisy("b"))
    found = result(tmp_path)
    assert found.sample_ratio_counts == (128, 128)
    assert found.sample_ratio_p == 1
    assert found.verdict.kind == "undecided"


def test_other_tokens_end_it_early_where_looking_is_allowed(tmp_path: Path) -> None:
    stopping = {"rule": "always_valid", "max_requests": 2000, "min_units": 20}
    why = play(tmp_path, plan(stopping=stopping), FakeArm(), FakeArm(wrong=lambda ask: ask.name == "000003"))
    assert why.startswith("1 pairs got different tokens")
    assert len(logged(tmp_path).records) == 40


def test_equal_arms_are_not_told_apart(tmp_path: Path) -> None:
    config = plan(assignment={"mode": "aa"}, stopping={"max_requests": 200})
    play(tmp_path, config, noisy("a"), noisy("b"))
    found = result(tmp_path)
    assert found.verdict.kind in ("undecided", "equivalent")
    assert found.mode == "aa"


def test_a_planted_effect_is_found_as_often_as_planned(tmp_path: Path) -> None:
    """The size is planned from a run of equal arms; then the treatment is 5 % faster in experiments of that size."""
    mean, capture = {"metric": "e2e_ms"}, tmp_path / "aa"
    play(
        capture,
        plan(assignment={"mode": "aa"}, primary=mean, stopping={"max_requests": 200}),
        noisy("a", 0.1),
        noisy("b", 0.1),
    )
    manifest = ExperimentFolder(capture).manifest()
    planned = plan_size(manifest, logged(capture), manifest.config.primary, Stopping(), 0.05, 0.8, 200)
    found = 0
    for number in range(12):
        folder = tmp_path / str(number)
        stopping = {"max_requests": 2 * planned.units}
        config = plan(assignment={"salt": f"s{number}"}, primary=mean, stopping=stopping)
        play(folder, config, noisy("a", 0.1), noisy("b", 0.095))
        found += result(folder).verdict.kind == "better"
    assert planned.power >= 0.8
    assert found >= 7  # of 12, 10 expected


class TestTakenUp:
    """An interrupted run resumes: complete pairs are not sent again, and no pair counts twice."""

    @staticmethod
    def broken_after(folder: Path, pairs: int, alone: bool) -> tuple[FakeArm, FakeArm]:
        """The first part of a killed run; ``alone``: killed while it wrote a pair."""
        a, b = FakeArm(), FakeArm()

        def stop(ask: LoadRequest) -> bool:
            if ask.name == f"{pairs:06}":
                raise KilledError
            return False

        b._fails = stop
        with pytest.raises(ExceptionGroup):
            play(folder, plan(warmup_requests=1), a, b)
        if alone:
            with closing(RecordWriter(folder)) as writer:
                writer.write(Record(f"{pairs:06}/off", "off", 1e6, end=1e6 + 1, pair=f"{pairs:06}", token_hash=b"x"))
        return a, b

    @pytest.mark.parametrize("alone", [False, True])
    def test_goes_on(self, tmp_path: Path, alone: bool) -> None:
        before = self.broken_after(tmp_path, 7, alone)
        a, b = FakeArm(), FakeArm()
        assert play(tmp_path, plan(warmup_requests=1), a, b) == "all planned requests were sent"
        for arm in (a, b):
            assert [pair_number(ask) for _, ask in arm.asked if pair_number(ask) is not None] == list(range(7, 20))
        earlier = {ask.salt for arm in before for _, ask in arm.asked}
        assert not earlier & {ask.salt for arm in (a, b) for _, ask in arm.asked}
        found = result(tmp_path)
        assert [arm.requests for arm in found.arms] == [20, 20]
        assert (found.primary.units, found.compared_outputs, found.mismatched_outputs) == (20, 20, 0)
        lone = [note for note in found.notes if "without the other request" in note]
        assert lone == (["records excluded, pairs without the other request: 1"] if alone else [])

    def test_one_that_is_complete_is_not_asked_again(self, tmp_path: Path) -> None:
        play(tmp_path, plan(warmup_requests=1), FakeArm(), FakeArm())
        a, b = FakeArm(), FakeArm()
        play(tmp_path, plan(warmup_requests=1), a, b)
        assert a.asked == b.asked == []

    def test_its_time_goes_on_too(self, tmp_path: Path) -> None:
        config = plan(stopping={"max_duration": "6s"})

        def stop(ask: LoadRequest) -> bool:
            if ask.name.startswith("000010"):
                raise KilledError
            return False

        with pytest.raises(ExceptionGroup):
            play(tmp_path, config, FakeArm(fails=stop), FakeArm(fails=stop))
        assert play(tmp_path, config, FakeArm(), FakeArm()) == "6 s have passed"
        assert 2 * 15 <= len(logged(tmp_path).records) <= 2 * 16  # 0.4 s each

    def test_times_go_on_too(self, tmp_path: Path) -> None:
        self.broken_after(tmp_path, 7, False)
        play(tmp_path, plan(warmup_requests=1), FakeArm(), FakeArm())
        counted = [r for r in logged(tmp_path).records if not r.warm_up]
        assert [r.arrival for r in counted[14:]] != [r.arrival for r in counted[:14]]
        assert min(r.arrival for r in counted) >= 0


def pair_number(ask: LoadRequest) -> int | None:
    """The number of the request's pair."""
    return None if ask.name.startswith("w") else int(ask.name.partition(".")[0])


def test_a_folder_holds_one_experiment(tmp_path: Path) -> None:
    play(tmp_path, plan(), FakeArm(), FakeArm())
    other: Any = plan(stopping={"max_requests": 60})
    with pytest.raises(ExperimentError, match=r"another experiment \(plan.stopping.max_requests was 40 and is 60\)"):
        play(tmp_path, other, FakeArm(), FakeArm())
