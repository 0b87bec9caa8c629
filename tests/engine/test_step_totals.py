"""The figures of all steps, against the sums over single ones."""

from __future__ import annotations

from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.step import StepResult
from tests.engine.tiny_engine import tiny_engine


def test_totals_are_the_sums_over_steps() -> None:
    engine = tiny_engine()
    for name, mode in (("drafted", SpeculationMode.ON), ("plain", SpeculationMode.OFF)):
        stopping = StoppingParams(max_tokens=20, ignore_eos=True)
        sampling, speculation = SamplingParams(temperature=0.0), SpeculationParams(mode)
        engine.submit(Request(name, tuple(range(5, 105)), sampling, stopping, speculation=speculation))
    results: list[StepResult] = []
    while engine.has_work():
        engine.step()
        if engine.last_step is not None and (not results or engine.last_step is not results[-1]):
            results.append(engine.last_step)
        if len(results) == 1:
            early = engine.load()
    load = engine.load()
    assert (early.steps, sum(early.steps_by_sequences), sum(early.steps_by_rows)) == (1, 1, 1)
    computed = [result for result in results if result.times.rows]
    assert load.steps == len(computed)
    assert load.step_rows == sum(result.times.rows for result in computed)
    assert load.step_sequences == sum(result.sequences for result in computed)
    assert load.steps_by_sequences == [sum(r.sequences == 1 for r in computed), sum(r.sequences == 2 for r in computed)]
    sizes = [(result.times.rows - 1).bit_length() for result in computed]
    assert load.steps_by_rows == [sizes.count(power) for power in range(max(sizes) + 1)]
    assert load.verify_ms == sum(result.verify_ms for result in computed)
    assert load.commit_ms == sum(result.commit_ms for result in computed)
    traced = [(step.rows - step.prefill_rows - step.sequences) for step in engine.trace(1000)]
    assert load.draft_rows == sum(traced) > 0
    assert load.drafting_steps == sum(rows > 0 for rows in traced)
    assert load.drafting_steps <= load.steps
