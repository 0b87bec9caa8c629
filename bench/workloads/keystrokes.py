"""Fill in the middle while somebody types: an editor asks again every few keystrokes, in one session."""

from __future__ import annotations

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.fim import FILES, HOLES, fim_ids, fim_stopping, find_holes
from bench.workloads.sources import source_of
from specdec.models.tokenizer import Tokenizer

TYPED = (0.0, 0.2, 0.4, 0.6)  # of the missing text, as its author wrote it, when the editor asks


def typing_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[BenchPrompt]:
    """At least ``count`` counted requests. What is asked before anything is typed warms the session: from then on it
    has seen the file, and what it was answered at this place.

    Raises:
        WorkloadUnavailableError: the model was not trained to fill in the middle.
    """
    stopping = fim_stopping(tokenizer, max_tokens)
    per_file = HOLES * (len(TYPED) - 1)
    prompts: list[BenchPrompt] = []
    for place in FILES[: -(-count // per_file)]:
        source = source_of(place)
        for hole in find_holes(source, HOLES):
            for typed in TYPED:
                ids = fim_ids(tokenizer, source, hole, typed)
                name = f"typing/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}+{typed:.0%}"
                prompts.append(BenchPrompt(name, ids, stopping, session=place, counted=typed > 0))
    return prompts
