"""Decodes requests in a company and collects exactly what came out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.config import EngineConfig
from specdec.control.cost_table import CostTable
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import StepCosts
from specdec.errors import SpecdecError
from specdec.kv_cache import KvCacheManager
from specdec.types import Delta, Failed, Finished, Request, SpeculationMode
from specdec.verify.company import Company


@dataclass(slots=True)
class Outcome:
    """One sample's tokens and log-probabilities (top ones included), to be compared without tolerance."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)
    finish: str = ""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


Outcomes = dict[tuple[str, int], Outcome]


class CompanyRunner:
    """Runs requests through engines that share one set of weights and differ in everything else."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def run(
        self, company: Company, requests: Sequence[Request], on_done: Callable[[], None] = lambda: None
    ) -> Outcomes:
        """Outcomes by (request id, sample index).

        Raises:
            SpecdecError: a request failed.
        """
        engine = Engine(self._assemble(company))
        if company.warm:
            _decode(engine, requests, company, lambda: None)
        return _decode(engine, requests, company, on_done)

    def _assemble(self, company: Company) -> EngineParts:
        parts = self._parts
        speculation = parts.config.speculation.model_copy(
            update={
                "enabled": bool(company.drafters),
                "max_nodes": company.max_nodes,
                "max_depth": company.max_depth,
                "fixed_nodes": company.max_nodes,
                "fixed_depth": company.max_depth,
                "width": company.width,
                "trace_file": None,
            }
        )
        config: EngineConfig = parts.config.model_copy(
            update={
                "speculation": speculation,
                "prefill_chunk": min(company.prefill_chunk, parts.config.max_step_rows),
            }
        )
        pages = parts.info.kv_tokens // 64 if company.kv_pages is None else company.kv_pages
        drafters = [d for d in parts.drafters if d.name in company.drafters]
        # A short cache must still hold the longest request, so the context shrinks with it.
        limit = min(parts.info.max_context, pages * 64 - 64)
        info = dataclasses.replace(parts.info, max_context=limit)
        kv = KvCacheManager(pages, prefix_cache=company.prefix_cache)
        costs = _free_drafting(parts) if company.free else parts.costs
        return dataclasses.replace(parts, config=config, info=info, drafters=drafters, kv=kv, costs=costs)


def _free_drafting(parts: EngineParts) -> StepCosts:
    """Costs under which more rows cost little and drafting nothing: the controller drafts wherever it sees a chance."""
    rows = [1, parts.config.max_step_rows]
    verify = CostTable(rows, [0], [[1e6, 1.01e6]]).as_dict()
    level = CostTable(rows, [0], [[1.0, 1.0]]).as_dict()
    return StepCosts(verify, {drafter.name: level for drafter in parts.drafters if drafter.costly})


def _in_mode(request: Request, company: Company) -> Request:
    mode = SpeculationMode.AUTO if company.controlled else SpeculationMode.ON
    return dataclasses.replace(request, speculation=dataclasses.replace(request.speculation, mode=mode))


def _decode(engine: Engine, requests: Sequence[Request], company: Company, on_done: Callable[[], None]) -> Outcomes:
    outcomes: Outcomes = {}
    steps = 0
    waiting = list(reversed(requests))
    running: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < company.concurrency:
            request = waiting.pop()
            engine.submit(_in_mode(request, company))
            running[request.request_id] = request.sampling.n
        steps += 1
        if company.preempt_every and steps % company.preempt_every == 0:
            engine.preempt_newest()
        for event in engine.step():
            if isinstance(event, Failed):
                raise SpecdecError(f"request {event.request_id} failed: {event.message}")
            if isinstance(event, Delta):
                outcome = outcomes.setdefault((event.request_id, event.index), Outcome())
                outcome.tokens += event.token_ids
                outcome.logprobs += [(entry.logprob, tuple(entry.top)) for entry in event.logprobs]
            elif isinstance(event, Finished):
                outcome = outcomes.setdefault((event.request_id, event.index), Outcome())
                outcome.finish = str(event.reason)
                outcome.drafted = event.stats.num_draft_tokens
                outcome.accepted = event.stats.num_accepted_draft_tokens
                outcome.preemptions = event.usage.preemptions
                running[event.request_id] -= 1
                if running[event.request_id] == 0:
                    del running[event.request_id]
                    on_done()
    return outcomes
