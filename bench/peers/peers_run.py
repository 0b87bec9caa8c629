"""Everything one run found: answers by prompt and arm, and who is missing and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.peers.answer import Answer
from bench.peers.arm import Arm
from bench.peers.peer_prompt import PeerPrompt


@dataclass(slots=True)
class PeersRun:
    """``arms`` in the order of the tables; ``about`` by engine or arm. ``missing``: why an arm has no figures, or none
    from some point on; ``left_out``: why a workload has none. ``machine``: hardware, commands."""

    arms: list[Arm] = field(default_factory=list)
    prompts: list[PeerPrompt] = field(default_factory=list)
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, arm: Arm, prompt: PeerPrompt, answer: Answer) -> None:
        """``arm`` answered ``prompt``."""
        self.answers[arm.name, prompt.name] = answer

    def answers_of(self, arm: Arm, workload: str) -> dict[str, Answer]:
        """By the prompts' names: what ``arm`` made of those that count and that it answered."""
        names = [prompt.name for prompt in self.prompts if prompt.workload == workload and prompt.counted]
        found = {name: self.answers.get((arm.name, name)) for name in names}
        return {name: answer for name, answer in found.items() if answer is not None and not answer.error}

    @property
    def workloads(self) -> list[str]:
        """In the order in which they were asked."""
        return list(dict.fromkeys(prompt.workload for prompt in self.prompts))

    def faults(self) -> list[str]:
        """Single prompts that an arm refused."""
        return [f"{arm} on {name}: {answer.error}" for (arm, name), answer in self.answers.items() if answer.error]
