"""Many short requests at once, only to keep an engine's batch full."""

from __future__ import annotations

from bench.texts import long_text
from bench.workloads.bench_prompt import BenchPrompt
from specdec.models.tokenizer import Tokenizer
from specdec.types import StoppingParams

PROMPT_TOKENS = 96
MAX_TOKENS = 48


def batch_prompts(tokenizer: Tokenizer, count: int) -> list[BenchPrompt]:
    """``count`` different stretches of real code, each to be continued by exactly `MAX_TOKENS` tokens."""
    tokens = tokenizer.encode(long_text())
    stride = (len(tokens) - PROMPT_TOKENS) // count
    stopping = StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        BenchPrompt(f"batch/{i}", tuple(tokens[i * stride : i * stride + PROMPT_TOKENS]), stopping)
        for i in range(count)
    ]
