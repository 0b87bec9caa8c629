"""What speculation costs where it is off: a loaded engine against one built without any of it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.texts import long_text
from specdec.engine.engine import Engine, EngineParts
from specdec.types import Delta, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams

MAX_TOKENS = 64
PROMPT_TOKENS = 128


@dataclass(slots=True)
class OffCost:
    """Milliseconds per step of both engines, neighbours in time; per request, their sums."""

    loaded_ms: list[float] = field(default_factory=list)
    bare_ms: list[float] = field(default_factory=list)
    loaded_request_ms: list[float] = field(default_factory=list)
    bare_request_ms: list[float] = field(default_factory=list)

    def add(self, loaded: list[float], bare: list[float]) -> None:
        """One request's steps."""
        self.loaded_ms += loaded
        self.bare_ms += bare
        self.loaded_request_ms.append(sum(loaded) / len(loaded))
        self.bare_request_ms.append(sum(bare) / len(bare))

    def as_dict(self) -> dict[str, float]:
        """The figures by name. Ratios are loaded over bare: 1.01 is a cost of one percent."""
        loaded, bare = statistics.median(self.loaded_ms), statistics.median(self.bare_ms)
        requests = statistics.median(self.loaded_request_ms) / statistics.median(self.bare_request_ms)
        pairs = statistics.median(a / b for a, b in zip(self.loaded_ms, self.bare_ms, strict=True))
        return {
            "steps": len(self.loaded_ms),
            "loaded_step_ms": round(loaded, 4),
            "bare_step_ms": round(bare, 4),
            "step_ratio_of_medians": round(loaded / bare, 4),
            "step_median_of_ratios": round(pairs, 4),
            "tpot_ratio_of_medians": round(requests, 4),
        }


class OffCostBench:
    """Two engines over one decoder and one KV cache, stepped in turn: the machine's drift meets both alike."""

    def __init__(self, loaded: Engine, parts: EngineParts, clock: Callable[[], float] = time.perf_counter) -> None:
        speculation = parts.config.speculation.model_copy(
            update={"enabled": False, "trace_steps": 0, "trace_file": None}
        )
        config = parts.config.model_copy(update={"speculation": speculation})
        self._loaded, self._clock = loaded, clock
        self._bare = Engine(dataclasses.replace(parts, drafters=(), config=config))
        self._tokens = parts.tokenizer.encode(long_text())

    def run(self, requests: int = 8) -> OffCost:
        """``requests`` real prompts, decoded greedily by both engines at the same time."""
        cost = OffCost()
        for number in range(-1, requests):  # the first one warms both up
            loaded, bare = self._pair(number)
            if number >= 0:
                cost.add(loaded, bare)
        return cost

    def _pair(self, number: int) -> tuple[list[float], list[float]]:
        """Times of the decode steps of one request, in both engines."""
        loaded = self._steps(self._loaded, self._request("loaded", number))
        bare = self._steps(self._bare, self._request("bare", number))
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(MAX_TOKENS - 1):
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(next((loaded, bare)[which]))
        for rest in (loaded, bare):
            for _ in rest:
                raise AssertionError("one token per step was asked for")
        return times

    def _steps(self, engine: Engine, request: Request) -> Iterator[float]:
        """Milliseconds of each step after the one with the first token. That one is run by the time of the first."""
        engine.submit(request)
        while not any(isinstance(event, Delta) for event in engine.step()):
            pass
        while engine.has_work():
            began = self._clock()
            engine.step()
            yield (self._clock() - began) * 1e3

    def _request(self, engine: str, number: int) -> Request:
        start = (number + 1) * PROMPT_TOKENS % max(1, len(self._tokens) - PROMPT_TOKENS)
        return Request(
            f"off-cost-{number}",
            tuple(self._tokens[start : start + PROMPT_TOKENS]),
            SamplingParams(temperature=0.0),
            StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
            speculation=SpeculationParams(SpeculationMode.OFF),
            cache_salt=f"off-cost/{engine}",
        )
