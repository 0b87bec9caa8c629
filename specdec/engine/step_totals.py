"""What an engine's steps come to since its start."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.step.step import StepResult
from specdec.types import EngineLoad


@dataclass(slots=True)
class StepTotals:
    """Names as in `EngineLoad`. A step that computed nothing does not count."""

    steps: int = 0
    drafting_steps: int = 0
    step_rows: int = 0
    draft_rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0

    def add(self, result: StepResult) -> None:
        """A step was run."""
        if not result.rows:
            return
        self.steps += 1
        self.drafting_steps += result.draft_rows > 0
        self.step_rows += result.rows
        self.draft_rows += result.draft_rows
        self.plan_ms += result.plan_ms
        self.draft_ms += result.draft_ms
        self.verify_ms += result.verify_ms
        self.commit_ms += result.commit_ms

    def told(self, load: EngineLoad) -> EngineLoad:
        """``load`` with these in it."""
        return replace(
            load, steps=self.steps, drafting_steps=self.drafting_steps, step_rows=self.step_rows,
            draft_rows=self.draft_rows, plan_ms=self.plan_ms, draft_ms=self.draft_ms, verify_ms=self.verify_ms,
            commit_ms=self.commit_ms,
        )  # fmt: skip
