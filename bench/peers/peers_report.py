"""The report of `specdec bench peers`: JSON, and Markdown for docs/performance.md."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.peer import OURS, OURS_AUTO, OURS_OFF, Arm
from specdec.load.figures import in_cell, rounded
from specdec.load.request import LoadRequest, Record

FEWEST = 4  # tokens after the first; in shorter answers the text held back for stop strings dominates the time


def time_per_token(answer: Record) -> float | None:
    """Milliseconds per token after the first; None for fewer than `FEWEST` of them."""
    return answer.tpot_ms if answer.ok and answer.output_tokens > FEWEST else None


def per_token(answers: Mapping[str, Record]) -> float | None:
    """Time after the first tokens over the number of tokens after the first, in ms."""
    timed = [answer for answer in answers.values() if time_per_token(answer) is not None]
    return sum(a.e2e_ms - a.ttft_ms for a in timed) / sum(a.output_tokens - 1 for a in timed) if timed else None


def _over(answers: Mapping[str, Record], ours: Mapping[str, Record]) -> float | None:
    both = [
        name for name in answers
        if name in ours and None not in (time_per_token(answers[name]), time_per_token(ours[name]))
    ]  # fmt: skip
    theirs, base = per_token({n: answers[n] for n in both}), per_token({n: ours[n] for n in both})
    return theirs / base if theirs is not None and base else None


_ROOT = Path(__file__).parents[2]
_PLAIN = re.compile(r"[\w./~:=,+{}-]+")
_HEAD = (
    "engine", "weights", "ms per token, median", "of total time", "over specdec auto", "over specdec off", "TTFT ms",
    "tokens", "same text as without drafts",
)  # fmt: skip


@dataclass(slots=True)
class PeersRun:
    """The answers of all engines, and their figures."""

    arms: list[Arm] = field(default_factory=list)  # in the order of the tables
    prompts: Mapping[str, Seq[LoadRequest]] = field(default_factory=dict)  # by workload
    answers: dict[tuple[str, str], Record] = field(default_factory=dict)  # by names of arm and prompt
    readings: dict[tuple[str, str], Record] = field(default_factory=dict)  # likewise, where prompts are read ahead
    missing: dict[str, str] = field(default_factory=dict)  # engine or arm that failed -> reason
    left_out: list[str] = field(default_factory=list)  # omitted workloads, with the reason
    about: dict[str, dict[str, Any]] = field(default_factory=dict)  # by arm, as `HttpPeer.facts`
    machine: dict[str, Any] = field(default_factory=dict)  # hardware, models, settings
    seconds: float = 0.0
    stopped: bool = False  # before its end

    def answers_of(self, arm: str, workload: str) -> dict[str, Record]:
        """An arm's answers to the counted prompts of a workload, by prompt name, without failed ones."""
        names = [ask.name for ask in self.prompts[workload] if ask.counted]
        found = {name: self.answers.get((arm, name)) for name in names}
        return {name: answer for name, answer in found.items() if answer is not None and answer.ok}

    def faults(self) -> list[str]:
        """Prompts that an arm refused, with the reason."""
        return [f"{arm} on {name}: {answer.error}" for (arm, name), answer in self.answers.items() if not answer.ok]

    def summary(self, arm: Arm, workload: str) -> dict[str, Any]:
        """Figures of an arm's answers to the counted prompts of a workload; None where there is none."""
        answers, plain = self.answers_of(arm.name, workload), self.answers_of(arm.plain, workload)
        times = [tpot for answer in answers.values() if (tpot := time_per_token(answer)) is not None]
        same = sum(name in plain and plain[name].text == answer.text for name, answer in answers.items())
        return {
            "answered": len(answers),
            "asked": sum(ask.counted for ask in self.prompts[workload]),
            "timed": len(times),  # answers with a time per token
            "tokens": sum(answer.output_tokens for answer in answers.values()),
            "median_ms": rounded(statistics.median(times)) if times else None,  # per token after the first
            "total_ms": rounded(per_token(answers)),  # all time after the first tokens over all tokens after the first
            "ttft_ms": rounded(statistics.median(answer.ttft_ms for answer in answers.values())) if answers else None,
            # Time per token over ours, on prompts that both answered
            "over_auto": rounded(_over(answers, self.answers_of(OURS_AUTO, workload))),
            "over_off": rounded(_over(answers, self.answers_of(OURS_OFF, workload))),
            # Answers equal to those of the same engine without drafts
            "same_text": None if arm.plain == arm.name else same,
        }

    def as_dict(self) -> dict[str, Any]:
        """Figures by workload and arm, every answer, commands and hardware, as JSON types."""
        return {
            "machine": self.machine,
            "engines": {
                arm.name: {"weights": arm.weights, "plain": arm.plain, **self._about(arm)} for arm in self.arms
            },
            "missing": {name: _short(why) for name, why in self.missing.items()},
            "left_out": self.left_out,
            "faults": self.faults(),
            "workloads": {
                workload: {arm.name: self.summary(arm, workload) for arm in self.arms}
                for workload in self.prompts
            },
            "prompts": [
                {"workload": workload, "name": ask.name, "tokens": len(ask.ids), "counted": ask.counted,
                 "answers": {arm.name: _answer_figures(self.answers[key]) for arm in self.arms
                             if (key := (arm.name, ask.name)) in self.answers}}
                for workload, asks in self.prompts.items() for ask in asks
            ],
            "seconds": round(self.seconds, 1),
            "stopped": self.stopped,
        }  # fmt: skip

    def markdown(self) -> str:
        """A table per workload, then hardware and commands."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for workload, asks in self.prompts.items():
            counted = [ask for ask in asks if ask.counted]
            length = sum(len(ask.ids) for ask in counted) / max(1, len(counted))
            yield f"**{workload}**, {len(counted)} prompts of {length:.0f} tokens on average"
            yield ""
            yield f"| {' | '.join(_HEAD)} |"
            yield "|" + "---|" * len(_HEAD)
            for arm in self.arms:
                yield f"| {' | '.join(self._row(arm, workload))} |"
            yield ""
            if (best := self._best_other(workload)) is not None:
                ms, over_auto, name = best
                yield f"Fastest of the others: {name}, {ms:.1f} ms per token, {over_auto:.2f} times specdec auto's."
                yield ""
        yield from self._notes()

    def _best_other(self, workload: str) -> tuple[float, float, str] | None:
        """Time per token in ms, its ratio to specdec auto's, and name of the fastest arm that is not ours."""
        found = [(self.summary(arm, workload), arm.name) for arm in self.arms if arm.engine != OURS]
        timed = [(s["total_ms"], s["over_auto"], name) for s, name in found if s["answered"] == s["asked"]]
        return min(((ms, over, name) for ms, over, name in timed if ms and over), default=None)

    def _about(self, arm: Arm) -> dict[str, Any]:
        about = self.about.get(arm.name, {})
        return about | {"command": [_short(word) for word in about["command"]]} if about else {}

    def _row(self, arm: Arm, workload: str) -> list[str]:
        s = self.summary(arm, workload)
        if not s["answered"]:
            return [arm.name, arm.weights, *["-"] * (len(_HEAD) - 2)]
        count = str(s["tokens"])
        if s["answered"] < s["asked"]:
            count += f" ({s['answered']} of {s['asked']} prompts)"
        same = "-" if s["same_text"] is None else f"{s['same_text']} of {s['answered']}"
        digits = {"median_ms": 1, "total_ms": 1, "over_auto": 2, "over_off": 2, "ttft_ms": 0}
        return [arm.name, arm.weights, *(in_cell(s[name], shown) for name, shown in digits.items()), count, same]

    def _notes(self) -> Iterator[str]:
        for name, why in self.missing.items():
            yield f"- without {name}: {_short(why)}"
        for line in self.left_out:
            yield f"- left out {line}"
        for line in self.faults():
            yield f"- {line}"
        for name, value in self.machine.items():
            yield f"- {name}: {'unknown' if value is None else value}"
        processes: dict[str, list[str]] = {}
        for arm in self.arms:
            if about := self._about(arm):
                facts = f"{about['version']}; `{' '.join(map(_quoted, about['command']))}`"
                processes.setdefault(facts, []).append(arm.name)
        yield from (f"- {', '.join(names)}: {facts}" for facts, names in processes.items())
        yield f"- seconds: {self.seconds:.0f}"


def _answer_figures(answer: Record) -> dict[str, Any]:
    if not answer.ok:
        return {"error": answer.error}
    return {
        "tokens": answer.output_tokens, "ttft_ms": round(answer.ttft_ms, 3), "e2e_ms": round(answer.e2e_ms, 3),
        "tpot_ms": rounded(time_per_token(answer)), "text": answer.text,
    }  # fmt: skip


def _short(text: str) -> str:
    """Remove this machine's paths from the text."""
    return text.replace(f"{_ROOT}/", "").replace(str(Path.home()), "~")


def _quoted(word: str) -> str:
    """The word quoted for a shell that expands the tilde."""
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)
