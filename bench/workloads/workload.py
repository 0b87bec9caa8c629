"""A named list of prompts, in the order in which they are asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.workloads.bench_prompt import BenchPrompt


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups run one after the other; of a group, ``at_once`` prompts at a time (None: all), the next one entering as
    one leaves. No prompt occurs twice: an engine that remembers its texts would know the second answer by heart."""

    name: str
    groups: tuple[tuple[BenchPrompt, ...], ...]
    at_once: int | None = None

    @property
    def concurrent(self) -> bool:
        """Whether prompts run at the same time."""
        return any(len(group) > 1 for group in self.groups)

    @property
    def n_counted(self) -> int:
        """Groups whose figures count."""
        return sum(group[0].counted for group in self.groups)

    @staticmethod
    def one_by_one(name: str, prompts: Seq[BenchPrompt]) -> Workload:
        """Every prompt on its own."""
        return Workload(name, tuple((prompt,) for prompt in prompts))


def uncounted(prompts: Seq[BenchPrompt], max_tokens: int | None = None) -> list[BenchPrompt]:
    """The same prompts for warming up, at most ``max_tokens`` long each."""
    shorter = []
    for prompt in prompts:
        stopping = prompt.stopping
        if max_tokens is not None:
            stopping = dataclasses.replace(stopping, max_tokens=min(max_tokens, stopping.max_tokens or max_tokens))
        shorter.append(dataclasses.replace(prompt, stopping=stopping, counted=False))
    return shorter
