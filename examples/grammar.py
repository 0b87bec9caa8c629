"""Answers that must match something: one of some words, a regular expression, a JSON schema.

python examples/grammar.py --server 127.0.0.1:8400
"""

from __future__ import annotations

import argparse
import asyncio
import json

from specdec.client import CallError, Client
from specdec.core.types import FinishReason, GrammarKind, GrammarParams, SamplingParams, StoppingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"enum": ["tea", "coffee"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
ASKED = (
    ("Is the sky blue? ", GrammarParams(GrammarKind.CHOICE, json.dumps(["yes", "no"]))),
    ("The year is ", GrammarParams(GrammarKind.REGEX, "[12][0-9]{3}")),
    ("A person, as JSON: ", GrammarParams(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))),
)


async def ask(server: str, max_tokens: int) -> None:
    """Print each answer, and how much of it the grammar alone decided: what it forces is drafted."""
    async with Client(server) as client:
        for prompt, grammar in ASKED:
            answer = await client.generate(
                prompt,
                grammar=grammar,
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=max_tokens),
            )
            (sample,) = answer.samples
            forced = sample.stats.by_drafter.get("grammar")
            accepted = forced.num_accepted_draft_tokens if forced else 0
            print(
                f"{grammar.kind}: {sample.text!r} [{len(sample.token_ids)} tokens, {accepted} drafted by the grammar]"
            )
            if sample.reason is FinishReason.LENGTH:
                print("  cut off by --max-tokens: so far it is only the beginning of a match")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", default="127.0.0.1:8400")
    parser.add_argument("--max-tokens", type=int, default=100)
    given = parser.parse_args()
    try:
        asyncio.run(ask(given.server, given.max_tokens))
    except CallError as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
