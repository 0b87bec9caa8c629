"""A drafter of one's own, in an engine of one's own, beside plain decoding (docs/adding-a-drafter.md).

python examples/own_drafter.py --target smollm2-135m
"""

from __future__ import annotations

import argparse
import dataclasses

import specdec  # noqa: F401  # puts the package `draft` on the path

# isort: split
from draft.protocol import Drafter, DraftTask
from specdec.config import EngineConfig
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import (
    Delta,
    Finished,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    StoppingParams,
)
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.models.progress import Progress

PROMPT = "red green blue black white\n" * 4 + "red"
SURE = 0.7  # what a first guess is worth; the controller soon knows better


class BigramDrafter(Drafter):
    """Proposes what followed the last two tokens when they stood together before, and what followed that."""

    name = "bigram"

    def __init__(self) -> None:
        self._next: dict[Sequence, dict[tuple[int, int], int]] = {}  # what followed two tokens most recently
        self._read: dict[Sequence, int] = {}  # tokens looked at

    def begin(self, sequence: Sequence) -> None:
        """A new sequence: there is nothing to remember yet."""
        self._next[sequence], self._read[sequence] = {}, 2

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        """A chain."""
        sequence, tokens = task.sequence, task.sequence.tokens
        follower = self._next[sequence]
        for i in range(self._read[sequence], len(tokens)):
            follower[tokens[i - 2], tokens[i - 1]] = tokens[i]
        self._read[sequence] = max(2, len(tokens))
        node, last = 0, tuple(tokens[-2:])
        while node >= 0 and last in follower:
            node = task.add(tree, node, follower[last], SURE)  # -1 where there is no room for more
            last = (last[1], follower[last])

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        del self._next[sequence], self._read[sequence]


def with_bigrams(parts: EngineParts) -> EngineParts:
    """``parts`` with the drafter added."""
    drafters = [*parts.drafters, BigramDrafter()]
    info = dataclasses.replace(parts.info, drafters=tuple(drafter.name for drafter in drafters))
    return dataclasses.replace(parts, drafters=drafters, info=info)


def build(config: EngineConfig, progress: Progress) -> Engine:
    """What a server runs with ``Serving(..., factory="own_drafter:build")``."""
    return Engine(with_bigrams(build_parts(config, progress)))


def run(engine: Engine, request: Request) -> tuple[list[int], SpeculationStats]:
    """The tokens of ``request``, and what drafting did."""
    tokens, stats = [], SpeculationStats()
    engine.submit(request)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Delta):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                stats = event.stats
    return tokens, stats


def main() -> None:
    """Read the command line, decode the same prompt twice."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    parts = with_bigrams(build_parts(EngineConfig(target=given.target, kv_tokens=2048)))
    engine = Engine(parts)
    plain = Request(
        "plain",
        tuple(parts.tokenizer.encode(PROMPT)),
        SamplingParams(temperature=0.0),
        StoppingParams(max_tokens=given.max_tokens, ignore_eos=True),
        speculation=SpeculationParams(SpeculationMode.OFF),
    )
    only_bigrams = SpeculationParams(SpeculationMode.ON, drafters=("bigram",))
    wanted, before = run(engine, plain)
    tokens, after = run(engine, dataclasses.replace(plain, request_id="drafted", speculation=only_bigrams))
    engine.close()
    print(parts.tokenizer.decode(tokens))
    print(f"[{before.num_steps} steps without drafts, {after.num_steps} with bigrams]")
    print(f"[{after.num_accepted_draft_tokens} of {after.num_draft_tokens} draft tokens accepted]")
    if tokens != wanted:
        raise SystemExit("the tokens differ: that is a bug of the engine, never of a drafter")


if __name__ == "__main__":
    main()
