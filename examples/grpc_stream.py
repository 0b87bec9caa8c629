"""Streams an answer over gRPC, with a say in how it is drafted, and prints what drafting did for it.

python examples/grpc_stream.py --server 127.0.0.1:8400 "Why is the sky blue?"
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import aclosing

from specdec.client import CallError, ChatTurn, Client
from specdec.core.types import (
    Delta,
    Finished,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    Started,
    StoppingParams,
)


async def ask(server: str, question: str, mode: SpeculationMode, max_tokens: int) -> None:
    """Print the answer as it comes, then its figures."""
    async with Client(server) as client:
        stream = client.stream(
            [ChatTurn("user", question)],
            sampling=SamplingParams(temperature=0.0),
            stopping=StoppingParams(max_tokens=max_tokens),
            # The caps bound every tree. None of this changes a token of the answer, only when it comes.
            speculation=SpeculationParams(mode, max_nodes=15, max_depth=8),
        )
        async with aclosing(stream) as events:  # leaving it early cancels the call, and the engine forgets the request
            async for event in events:
                if isinstance(event, Started):
                    print(f"[{event.prompt_tokens} tokens of prompt, {event.cached_tokens} of them in the cache]")
                elif isinstance(event, Delta):
                    print(event.text, end="", flush=True)
                elif isinstance(event, Finished):
                    tokens, ms = event.usage.output_tokens, event.timings.decode_ms
                    print(f"\n[{tokens} tokens in {ms:.0f} ms behind the first, ended by {event.reason}]")
                    show(event.stats)


def show(stats: SpeculationStats) -> None:
    """Steps and drafts, in all and by drafter."""
    print(f"[{stats.num_steps} steps, {stats.num_spec_steps} of them verified drafts]")
    print(f"[{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} draft tokens accepted]")
    for name, drafter in stats.by_drafter.items():
        print(f"[  {name}: {drafter.num_accepted_draft_tokens} of {drafter.num_draft_tokens}]")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--server", default="127.0.0.1:8400")
    parser.add_argument("--speculation", type=SpeculationMode, choices=[*SpeculationMode], default=SpeculationMode.AUTO)
    parser.add_argument("--max-tokens", type=int, default=200)
    given = parser.parse_args()
    try:
        asyncio.run(ask(given.server, given.question, given.speculation, given.max_tokens))
    except CallError as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
