"""The workloads by name."""

from __future__ import annotations

from collections.abc import Callable

from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.chat import chat_prompts
from bench.workloads.concurrent import MIXES, concurrent_workload
from bench.workloads.edit import edit_prompts
from bench.workloads.fim import fim_prompts
from bench.workloads.humaneval import humaneval_prompts
from bench.workloads.keystrokes import typing_prompts
from bench.workloads.mixed import mixed_prompts
from bench.workloads.workload import Workload, uncounted
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.models.tokenizer import Tokenizer

_Make = Callable[[Tokenizer, int, int | None], list[BenchPrompt]]
_SESSIONS: dict[str, _Make] = {"fim": fim_prompts, "typing": typing_prompts}
_ONE_BY_ONE: dict[str, _Make] = {
    "humaneval": humaneval_prompts,
    "edit": edit_prompts,
    "chat": chat_prompts,
}


def make_workload(
    name: str, tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None]
) -> list[Workload]:
    """What ``name`` (one of `WORKLOAD_NAMES`) stands for: one workload, or one per mix of `concurrent`.

    ``count`` prompts are counted, as far as there are so many; ``max_tokens`` replaces each workload's own limit.
    ``note`` is told of every part that is left out, and why.

    Raises:
        WorkloadUnavailableError: nothing of it can be had.
        ValueError: there is no such workload.
    """
    if name == "concurrent":
        return _mixes(tokenizer, count, max_tokens, note)
    if name == "mixed":
        return [Workload.one_by_one(name, mixed_prompts(tokenizer, count, max_tokens, note))]
    if name in _SESSIONS:  # the first requests of a session are warm-up enough
        prompts = _SESSIONS[name](tokenizer, count, max_tokens)
    elif name in _ONE_BY_ONE:
        prompts = _ONE_BY_ONE[name](tokenizer, count + 1, max_tokens)
        prompts = uncounted(prompts[:1]) + prompts[1:]
    else:
        raise ValueError(f"{name}: no such workload")
    return [Workload.one_by_one(name, prompts)]


def _mixes(tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None]) -> list[Workload]:
    found: list[Workload] = []
    for mix in MIXES:
        try:
            # One warm-up does for all: what it teaches is how much a full batch costs.
            found.append(concurrent_workload(mix, tokenizer, count, max_tokens, warm_up=not found))
        except WorkloadUnavailableError as error:
            note(f"concurrent/{mix}: {error}")
    if not found:
        raise WorkloadUnavailableError("none of its kinds of prompt can be had")
    return found
