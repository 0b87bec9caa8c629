"""Decodes a file of prompts, one a line, with speculation off and auto; the same tokens, how much sooner?

python examples/compare_off_auto.py --server 127.0.0.1:8400 prompts.txt
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from pathlib import Path

from specdec.client import CallError, Client, GeneratedSample
from specdec.core.types import SamplingParams, SpeculationMode, SpeculationParams, StoppingParams


async def decode(client: Client, prompt: str, mode: SpeculationMode, max_tokens: int) -> GeneratedSample:
    """One answer. A salt of its own keeps it from what other runs left behind: cached prefixes, texts to draft from."""
    answer = await client.generate(
        prompt,
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=max_tokens),
        speculation=SpeculationParams(mode),
        cache_salt=uuid.uuid4().hex,
    )
    return answer.samples[0]


async def compare(server: str, prompts: list[str], max_tokens: int) -> int:
    """Print a line per prompt and one for all; how many came out differently."""
    total_off = total_auto = 0.0
    different = 0
    async with Client(server) as client:
        await decode(client, prompts[0], SpeculationMode.AUTO, max_tokens)  # not counted: warms up
        print("tokens  off ms  auto ms  ratio  steps  accepted  prompt")
        for prompt in prompts:
            off = await decode(client, prompt, SpeculationMode.OFF, max_tokens)
            auto = await decode(client, prompt, SpeculationMode.AUTO, max_tokens)
            off_ms, auto_ms, stats = off.timings.decode_ms, auto.timings.decode_ms, auto.stats
            total_off, total_auto = total_off + off_ms, total_auto + auto_ms
            same = off.token_ids == auto.token_ids
            different += not same
            print(
                f"{len(auto.token_ids):6} {off_ms:7.0f} {auto_ms:8.0f} {_ratio(off_ms, auto_ms):>6} {stats.num_steps:6}"
                f" {stats.num_accepted_draft_tokens:9}  {prompt[:40]}{'' if same else '  DIFFERENT TOKENS'}"
            )
    print(f"all: {total_off:.0f} ms off, {total_auto:.0f} ms auto, ratio {_ratio(total_off, total_auto)}")
    return different


def _ratio(off_ms: float, auto_ms: float) -> str:
    """How many times as fast; nothing for answers of a single token, which take no time behind their first."""
    return f"{off_ms / auto_ms:.2f}" if auto_ms > 0 else "-"


def main() -> None:
    """Read the command line; ends with 1 where tokens differ, which they never do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--server", default="127.0.0.1:8400")
    parser.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()
    try:
        prompts = [line for line in given.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{given.prompts}: {error}; write a UTF-8 file with a prompt on each line") from None
    if not prompts:
        raise SystemExit(f"{given.prompts}: holds no prompt; write one on each line")
    try:
        different = asyncio.run(compare(given.server, prompts, given.max_tokens))
    except CallError as error:
        raise SystemExit(f"{error}") from None
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
