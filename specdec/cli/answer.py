"""A request's events as text that streams, or as one JSON object."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.types import Delta, Finished, RequestEvent, Started, TokenLogprobs
from specdec.types.as_json import metrics_dict


@dataclass(slots=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None


class Answer:
    """Collects a request's events. ``write`` gets text as it arrives: of one sample at once, of several each when it
    has ended, under a heading."""

    def __init__(self, model: str, samples: int, write: Callable[[str], None]) -> None:
        self._model = model
        self._write = write
        self._n = samples
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)
        self._started: Started | None = None

    def take(self, event: RequestEvent) -> None:
        """The next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Delta):
            sample = self._samples[event.index]
            sample.token_ids += event.token_ids
            sample.text += event.text
            sample.logprobs += event.logprobs
            if self._n == 1:
                self._write(event.text)
        elif isinstance(event, Finished):
            self._samples[event.index].end = event
            if self._n > 1:
                self._write(f"--- sample {event.index}\n{self._samples[event.index].text}\n")

    def as_dict(self, *, logprobs: bool) -> dict[str, Any]:
        """Facts of the request and of its first sample, and ``samples``: the same of every one."""
        samples = [_sample_dict(i, self._samples[i], logprobs) for i in range(self._n)]
        started = self._started
        head: dict[str, Any] = {"model": self._model}
        if started is not None:
            head |= {
                "request_id": started.request_id,
                "seed": started.seed,
                "prompt_tokens": started.prompt_tokens,
                "cached_tokens": started.cached_tokens,
            }
        first = {key: value for key, value in samples[0].items() if key != "index"}
        return {**head, **first, "samples": samples}

    def summary(self) -> str:
        """One line of figures about the first sample; empty when it has not ended."""
        end = self._samples[0].end
        if end is None:
            return ""
        tokens, steps, ms = end.usage.output_tokens, max(end.stats.num_steps, 1), end.timings.decode_ms
        rate = f", {(tokens - 1) / ms * 1e3:.1f} tokens/s" if ms > 0 and tokens > 1 else ""
        return f"[{tokens} tokens{rate}, {tokens / steps:.2f} per step, {end.reason}]"


def write_text(text: str) -> None:
    """Show text at once; characters that the terminal can not show become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _sample_dict(index: int, sample: _Sample, logprobs: bool) -> dict[str, Any]:
    end = sample.end
    found: dict[str, Any] = {"index": index, "token_ids": sample.token_ids, "text": sample.text}
    if end is not None:
        found |= {
            "finish_reason": end.reason.value,
            "matched_stop": end.matched_stop,
            "usage": asdict(end.usage),
            "metrics": metrics_dict(end.stats),
            "timings": asdict(end.timings),
        }
    if logprobs:
        found["logprobs"] = [asdict(row) for row in sample.logprobs]
    return found
