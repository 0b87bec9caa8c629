"""The figures of one run: JSON, and Markdown for docs/performance.md."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers.answer import Answer
from bench.peers.arm import OURS, OURS_AUTO, OURS_OFF, Arm
from bench.peers.arm_summary import ArmSummary, summarise
from bench.peers.peers_run import PeersRun

_ROOT = Path(__file__).parents[2]
_PLAIN = re.compile(r"[\w./~:=,+{}-]+")
_HEAD = (
    "engine", "weights", "ms per token, median", "of total time", "over ours auto", "over ours off", "TTFT ms",
    "tokens/s", "tokens", "same text as without drafts",
)  # fmt: skip


class PeersReport:
    """Of a run that has ended."""

    def __init__(self, run: PeersRun) -> None:
        self._run = run
        self._by_name = {arm.name: arm for arm in run.arms}

    def summary(self, arm: Arm, workload: str) -> ArmSummary:
        """What ``arm`` did in ``workload``."""
        run = self._run
        asked = sum(prompt.workload == workload and prompt.counted for prompt in run.prompts)
        plain = self._answers(arm.plain, workload) if arm.speculates else None
        return summarise(
            run.answers_of(arm, workload), asked, auto=self._answers(OURS_AUTO, workload),
            off=self._answers(OURS_OFF, workload), plain=plain,
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: figures by workload and arm, every answer, what was run on what."""
        run = self._run
        return {
            "machine": run.machine,
            "engines": {arm.name: {"weights": arm.weights, **self._about(arm)} for arm in run.arms},
            "missing": {name: _short(why) for name, why in run.missing.items()},
            "left_out": run.left_out,
            "faults": run.faults(),
            "workloads": {
                workload: {arm.name: self.summary(arm, workload).as_dict() for arm in run.arms}
                for workload in run.workloads
            },
            "wins": [line for workload in run.workloads for line in self.wins(workload)],
            "prompts": [
                {"workload": prompt.workload, "name": prompt.name, "tokens": len(prompt.ids), "counted": prompt.counted,
                 "answers": {arm.name: run.answers[key].as_dict() for arm in run.arms
                             if (key := (arm.name, prompt.name)) in run.answers}}
                for prompt in run.prompts
            ],
            "seconds": round(run.seconds, 1),
        }  # fmt: skip

    def wins(self, workload: str) -> list[str]:
        """A line for every arm of others that is faster than ours auto, or sooner with its first text; one line where
        none is."""
        rivals = [(self.summary(arm, workload), arm) for arm in self._run.arms if arm.engine != OURS]
        known = sorted((s.over_auto, arm.name) for s, arm in rivals if s.over_auto is not None)
        lines = [
            f"{workload}: **{name} beats ours auto**: {over:.2f} times its time per token"
            for over, name in known if over < 1
        ]  # fmt: skip
        if known and not lines:
            over, name = known[0]
            lines = [f"{workload}: ours auto is the fastest; next is {name} with {over:.2f} times its time per token"]
        return lines + self._sooner(workload)

    def _sooner(self, workload: str) -> list[str]:
        firsts = {arm: self.summary(arm, workload).ttft_ms for arm in self._run.arms}
        ours = next((ms for arm, ms in firsts.items() if arm.name == OURS_AUTO), None)
        if ours is None:
            return []
        return [
            f"{workload}: **{arm.name} has its first text before ours auto**: {ms:.0f} ms against {ours:.0f} ms"
            for arm, ms in firsts.items() if arm.engine != OURS and ms is not None and ms < ours
        ]  # fmt: skip

    def markdown(self) -> str:
        """Tables with all that is needed to read them."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        run = self._run
        for workload in run.workloads:
            counted = [prompt for prompt in run.prompts if prompt.workload == workload and prompt.counted]
            length = sum(len(prompt.ids) for prompt in counted) / max(1, len(counted))
            yield f"**{workload}**, {len(counted)} prompts of {length:.0f} tokens on average"
            yield ""
            yield f"| {' | '.join(_HEAD)} |"
            yield "|" + "---|" * len(_HEAD)
            for arm in run.arms:
                yield f"| {' | '.join(self._row(arm, workload))} |"
            yield ""
            yield from (f"- {line}" for line in self.wins(workload))
            yield ""
        yield from self._notes()

    def _answers(self, name: str, workload: str) -> dict[str, Answer]:
        arm = self._by_name.get(name)
        return {} if arm is None else self._run.answers_of(arm, workload)

    def _about(self, arm: Arm) -> dict[str, Any]:
        about = self._run.about.get(arm.name, {})
        return about | {"command": [_short(word) for word in about["command"]]} if about else {}

    def _row(self, arm: Arm, workload: str) -> list[str]:
        s = self.summary(arm, workload)
        if not s.answered:
            return [arm.name, arm.weights, *["-"] * (len(_HEAD) - 2)]
        count = f"{s.tokens}" if s.answered == s.asked else f"{s.tokens} ({s.answered} of {s.asked} prompts)"
        same = "-" if s.same_text is None else f"{s.same_text} of {s.answered}"
        return [
            arm.name, arm.weights, _number(s.median_ms, 1), _number(s.total_ms, 1), _number(s.over_auto, 2),
            _number(s.over_off, 2), _number(s.ttft_ms, 0), _number(s.tokens_per_s, 1), count, same,
        ]  # fmt: skip

    def _notes(self) -> Iterator[str]:
        run = self._run
        for name, why in run.missing.items():
            yield f"- without {name}: {_short(why)}"
        for line in run.left_out:
            yield f"- left out {line}"
        for line in run.faults():
            yield f"- {line}"
        for name, value in run.machine.items():
            yield f"- {name}: {value}"
        processes: dict[str, list[str]] = {}
        for arm in run.arms:
            if about := self._about(arm):
                facts = f"{about['version']}; `{' '.join(map(_quoted, about['command']))}`"
                processes.setdefault(facts, []).append(arm.name)
        yield from (f"- {', '.join(names)}: {facts}" for facts, names in processes.items())
        yield f"- seconds: {run.seconds:.0f}"


def _short(text: str) -> str:
    """Without what is this machine's and nobody else's."""
    return text.replace(f"{_ROOT}/", "").replace(str(Path.home()), "~")


def _quoted(word: str) -> str:
    """For a shell, which is to replace the tilde."""
    return word if _PLAIN.fullmatch(word) else shlex.quote(word)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
