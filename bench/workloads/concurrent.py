"""Eight requests at once all the time, of one kind or of several."""

from __future__ import annotations

from itertools import chain, zip_longest

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.chat import chat_prompts
from bench.workloads.edit import edit_prompts
from bench.workloads.humaneval import humaneval_prompts
from bench.workloads.workload import Workload, uncounted
from specdec.models.tokenizer import Tokenizer

AT_ONCE = 8
EDIT_TOKENS = 256
TURNS = 3  # requests per place: with one, what is measured is how long the slowest of eight runs on alone
WARM_UP_TOKENS = 24
MIXES = ("humaneval", "chat", "mixed", "edit")


def concurrent_workload(
    mix: str, tokenizer: Tokenizer, count: int, max_tokens: int | None = None, *, warm_up: bool = True
) -> Workload:
    """``count`` prompts, `TURNS` times `AT_ONCE` at least, after a short round to ``warm_up``.

    Raises:
        WorkloadUnavailableError: as the prompts of ``mix``.
    """
    first = AT_ONCE if warm_up else 0
    prompts = _prompts(mix, tokenizer, max(count, TURNS * AT_ONCE) + first, max_tokens)
    groups = [tuple(uncounted(prompts[:first], WARM_UP_TOKENS)), tuple(prompts[first:])]
    return Workload(f"concurrent/{mix}", tuple(group for group in groups if group), AT_ONCE)


def _prompts(mix: str, tokenizer: Tokenizer, count: int, max_tokens: int | None) -> list[BenchPrompt]:
    edit_tokens = max_tokens or EDIT_TOKENS
    if mix == "humaneval":
        return humaneval_prompts(tokenizer, count, max_tokens)
    if mix == "chat":
        return chat_prompts(tokenizer, count, max_tokens)
    if mix == "edit":
        return edit_prompts(tokenizer, count, edit_tokens)
    each = -(-count // 3)
    kinds = (
        edit_prompts(tokenizer, each, edit_tokens),
        chat_prompts(tokenizer, each, max_tokens),
        humaneval_prompts(tokenizer, each, max_tokens),
    )
    return [prompt for prompt in chain(*zip_longest(*kinds)) if prompt is not None][:count]
