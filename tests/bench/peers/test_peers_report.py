"""The figures of the report, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers.peer import Arm
from bench.peers.peers_report import PeersRun, per_token, time_per_token
from specdec.load.request import LoadRequest, Record
from tests.bench.peers.peers import answer

OFF, AUTO = Arm("specdec off", "specdec", "int8", "specdec off"), Arm("specdec auto", "specdec", "int8", "specdec off")
FAST, DRAFT = Arm("fast", "llama.cpp", "Q4_K_M", "fast"), Arm("fast n-gram", "llama.cpp", "Q4_K_M", "fast")
SLOW, GONE = Arm("slow", "vllm", "bf16", "slow"), Arm("gone", "vllm", "bf16", "slow")


def steady(tokens: int, tpot: float, ttft: float = 100.0, text: str = "a") -> Record:
    return answer(tokens, ttft, ttft + tpot * (tokens - 1), text)


def a_run() -> PeersRun:
    run = PeersRun(arms=[OFF, AUTO, FAST, DRAFT, SLOW, GONE], missing={"gone": "not installed"})
    asks = [LoadRequest(f"chat/{i}", 8, ids=(1,) * 10, counted=i > 0) for i in range(4)]
    run.prompts = {"chat": asks}
    warm, *counted = asks
    for arm, tpots in ((OFF, (60, 60, 60)), (AUTO, (30, 20, 40)), (FAST, (30, 30, 30)), (SLOW, (120, 100, 110))):
        run.answers[arm.name, warm.name] = steady(5, 9000)  # a figure that would show if it were counted
        for prompt, tpot in zip(counted, tpots, strict=True):
            name = prompt.name
            run.answers[arm.name, name] = steady(11, tpot, 50.0 if arm is FAST else 100.0, f"{arm.engine} {name}")
    first, short, refused = (prompt.name for prompt in counted)
    run.answers[DRAFT.name, first] = steady(21, 10, 50.0, "llama.cpp chat/1")
    run.answers[DRAFT.name, short] = answer(4, 40.0, 50.0, "other")  # too short for a time per token
    run.answers[DRAFT.name, refused] = Record("chat/3", 0.0, outcome="refused", error="HTTP 400: too long")
    return run


def test_figures_of_an_arm() -> None:
    report = a_run()
    auto = report.summary(AUTO, "chat")
    assert auto == {
        "answered": 3, "asked": 3, "timed": 3, "tokens": 33, "median_ms": 30.0, "total_ms": 30.0, "ttft_ms": 100.0,
        "over_auto": 1.0, "over_off": 0.5, "same_text": 3,
    }  # fmt: skip
    assert report.summary(SLOW, "chat")["over_auto"] == pytest.approx(110 / 30, abs=1e-4)
    assert report.summary(OFF, "chat")["same_text"] is None


def test_ratios_are_over_the_prompts_that_both_answered_at_length() -> None:
    draft = a_run().summary(DRAFT, "chat")
    assert (draft["answered"], draft["timed"], draft["tokens"]) == (2, 1, 25)
    assert draft["over_auto"] == pytest.approx(10 / 30, abs=1e-4)  # ours took 30 for the first prompt
    assert draft["over_off"] == pytest.approx(10 / 60, abs=1e-4)
    assert draft["same_text"] == 1


def test_the_tables_and_the_json_hold_all_of_it() -> None:
    run = a_run()
    run.machine, run.left_out = {"cpu": "a quick one"}, ["fim: no such tokens"]
    about = {"version": "llama 1", "command": [str(Path.home() / "x" / "llama-server"), "-m", "a b"]}
    run.about = {"fast": about, "fast n-gram": about, "slow": {"version": "v", "command": ["vllm"]}}
    run.missing["gone"] = f"no {Path.home()}/y"
    text = run.markdown()
    assert "| fast | Q4_K_M | 30.0 | 30.0 | 1.00 | 0.50 | 50 | 33 | - |" in text
    assert "| fast n-gram | Q4_K_M | 10.0 | 10.0 | 0.33 | 0.17 | 45 | 25 (2 of 3 prompts) | 1 of 2 |" in text
    assert "| gone | bf16 | - | - | - | - | - | - | - |" in text
    assert (
        "Fastest of the others: fast, 30.0 ms per token, 1.00 times specdec auto's." in text
    )  # the draft arm failed once
    for line in ("- without gone: no ~/y", "- left out fim: no such tokens", "- cpu: a quick one",
                 "- fast n-gram on chat/3: HTTP 400: too long",
                 "- fast, fast n-gram: llama 1; `~/x/llama-server -m 'a b'`", "- slow: v; `vllm`"):  # fmt: skip
        assert line in text.splitlines()
    figures = json.loads(json.dumps(run.as_dict()))
    assert figures["workloads"]["chat"]["specdec auto"]["over_off"] == 0.5
    assert figures["missing"] == {"gone": "no ~/y"}
    assert str(Path.home()) not in json.dumps(figures) + text
    assert figures["prompts"][3]["answers"]["fast n-gram"] == {"error": "HTTP 400: too long"}
    assert figures["prompts"][1]["answers"]["fast"]["tpot_ms"] == 30.0


def test_a_run_in_which_nobody_answered_has_tables_too() -> None:
    run = PeersRun([OFF], {"chat": [LoadRequest("chat/1", 8, ids=(1,))]}, missing={"specdec off": "dead"})
    assert "- without specdec off: dead" in run.markdown()


def test_only_answers_of_five_tokens_have_a_time_per_token() -> None:
    refused = steady(5, 10.0)
    refused.outcome = "refused"
    assert [time_per_token(found) for found in (steady(5, 10.0), steady(4, 10.0), refused)] == [10.0, None, None]


ANSWERS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(answer, st.integers(0, 50), st.floats(1, 9e3), st.floats(1e4, 1e5)),
    max_size=6,
)


def summary(answers: dict[str, dict[str, Record]], arm: str, plain: str) -> dict[str, Any]:
    """The figures of ``arm``, of answers by arm and prompt."""
    run = PeersRun(prompts={"chat": [LoadRequest(name, 8, ids=(1,)) for name in "abcdef"]})
    run.answers = {(name, prompt): found for name, by_prompt in answers.items() for prompt, found in by_prompt.items()}
    return run.summary(Arm(arm, "their", "bf16", plain), "chat")


@given(ANSWERS, ANSWERS, st.floats(0.25, 4))
def test_figures_hold_together(theirs: dict[str, Record], ours: dict[str, Record], scale: float) -> None:
    arms = {"specdec auto": ours, "specdec off": theirs, "their": theirs, "their drafts": theirs}
    found = summary(arms, "their drafts", plain="their")
    assert found["same_text"] == len(theirs)
    assert found["over_off"] == (None if per_token(theirs) is None else 1.0)
    times = [ms for a in theirs.values() if (ms := time_per_token(a)) is not None]
    assert found["timed"] == len(times)
    if times:
        assert min(times) * 0.999 <= found["total_ms"] <= max(times) * 1.001
    slower = {name: answer(a.output_tokens, a.ttft_ms * scale, a.e2e_ms * scale, a.text) for name, a in ours.items()}
    ratio = summary({"specdec auto": ours, "slower": slower}, "slower", plain="slower")
    assert ratio["over_off"] is None
    assert ratio["over_auto"] is None or ratio["over_auto"] == pytest.approx(scale, abs=1e-4)
