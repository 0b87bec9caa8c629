"""An engine with scripted step times on a virtual clock, so that figures can be computed by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.core.types import (
    Delta,
    DrafterStats,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationMode,
    SpeculationStats,
    Started,
    StepTrace,
    Timings,
    Usage,
)


@dataclass(slots=True)
class _Running:
    request: Request
    prefill_steps: int = 2
    done: int = 0
    steps: int = 0


@dataclass(slots=True)
class FakeEngine:
    """Each request first takes two prefill steps of 100 s, then decodes: one token per step of 1 s without
    speculation, ``run`` tokens per step of ``spec_step_s`` with it. The second prefill step brings the first tokens.
    ``wrong`` names the mode whose last token is not what it should be, ``failing`` breaks every request.
    """

    run: int = 4
    spec_step_s: float = 2.0
    wrong: SpeculationMode | None = None
    failing: bool = False
    now: float = 0.0
    seen: list[Request] = field(default_factory=list)
    traces: list[StepTrace] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)

    def clock(self) -> float:
        """Seconds of the virtual clock, including those between steps."""
        return self.now

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        self.now += 1000.0
        self.seen.append(request)
        self._running.append(_Running(request, 0 if request.stopping.max_tokens == 0 else 2))

    def has_work(self) -> bool:
        self.now += 10.0
        return bool(self._running)

    def step(self) -> list[RequestEvent]:
        events: list[RequestEvent] = []
        modes = {running.request.speculation.mode for running in self._running}
        prefills = any(running.prefill_steps for running in self._running)
        self.now += 100.0 if prefills else 1.0 if modes == {SpeculationMode.OFF} else self.spec_step_s
        self._trace()
        for running in list(self._running):
            events += self._advance(running)
        return events

    def trace(self, limit: int) -> list[StepTrace]:
        return self.traces[-limit:]

    def _trace(self) -> None:
        n = len(self._running)
        step = len(self.traces)
        none = (0.0,) * 6  # drafting, verifying, plan and commit
        self.traces.append(StepTrace(step, self.now, n, n, 0, 0.0, 0, 0, n, n, *none, step * 0.01))

    def _advance(self, running: _Running) -> list[RequestEvent]:
        request, events = running.request, list[RequestEvent]()
        off = request.speculation.mode is SpeculationMode.OFF
        limit = request.stopping.max_tokens or 0
        if running.prefill_steps == 2:
            events.append(Started(request.request_id, 0, len(request.prompt_ids), 0, 0.0))
        running.prefill_steps = max(0, running.prefill_steps - 1)
        if running.prefill_steps:
            return events
        if self.failing:
            self._running.remove(running)
            return [Failed(request.request_id, "MODEL_BROKEN", "no finite logit")]
        count = min(1 if off else self.run, limit - running.done)
        tokens = [request.prompt_ids[0] + running.done + i for i in range(count)]
        running.done, running.steps = running.done + count, running.steps + 1
        if running.done == limit and tokens and self.wrong is request.speculation.mode:
            tokens[-1] += 1
        if tokens:
            events.append(Delta(request.request_id, 0, tokens, "x" * count))
        if running.done == limit:
            self._running.remove(running)
            events.append(self._finished(running, off))
        return events

    def _finished(self, running: _Running, off: bool) -> Finished:
        drafted = 0 if off else running.done - running.steps
        stats = SpeculationStats(running.steps, 0 if off else running.steps, 2 * drafted, drafted)
        if not off:
            stats.by_drafter["suffix"] = DrafterStats(2 * drafted, drafted)
        usage = Usage(len(running.request.prompt_ids), 0, running.done)
        return Finished(running.request.request_id, 0, FinishReason.LENGTH, None, usage, stats, Timings())
