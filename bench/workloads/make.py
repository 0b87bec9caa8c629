"""The workloads by name, also those that mix kinds of prompts or ask several at the same time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, zip_longest

from bench.workloads import CONCURRENT_NAMES, MIXES
from bench.workloads.prompts import chat_prompts, edit_prompts, fim_prompts, humaneval_prompts, typing_prompts
from bench.workloads.workload import BenchPrompt, Workload, WorkloadUnavailableError, uncounted
from specdec.models.tokenizer import Tokenizer

AT_ONCE = 8
EDIT_TOKENS = 256
TURNS = 3  # requests per place: with one, what is measured is how long the slowest of eight runs on alone
WARM_UP_TOKENS = 24


def concurrent_workload(
    mix: str,
    tokenizer: Tokenizer,
    count: int,
    max_tokens: int | None = None,
    *,
    warm_up: bool = True,
    at_once: int = AT_ONCE,
) -> Workload:
    """``count`` prompts, `TURNS` times ``at_once`` at least, after a short round to ``warm_up``.

    Raises:
        WorkloadUnavailableError: as the prompts of ``mix``.
    """
    first = at_once if warm_up else 0
    prompts = _prompts(mix, tokenizer, max(count, TURNS * at_once) + first, max_tokens)
    groups = [tuple(uncounted(prompts[:first], WARM_UP_TOKENS)), tuple(prompts[first:])]
    return Workload(f"concurrent/{mix}", tuple(group for group in groups if group), at_once)


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


_KINDS: tuple[Callable[[Tokenizer, int, int | None], list[BenchPrompt]], ...] = (
    humaneval_prompts,
    edit_prompts,
    fim_prompts,
    chat_prompts,
)


def mixed_prompts(
    tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None]
) -> list[BenchPrompt]:
    """About ``count`` prompts, of every kind in turn, after one more that warms up; ``note`` gets what is left out.

    Raises:
        WorkloadUnavailableError: no kind is to be had.
    """
    each = -(-count // len(_KINDS))
    kinds: list[list[BenchPrompt]] = []
    for make in _KINDS:
        try:
            # A file's first hole only warms its session; of the others one more is needed for the engine itself.
            kinds.append(make(tokenizer, each + (not kinds), max_tokens))
        except WorkloadUnavailableError as error:
            note(f"mixed: {error}")
    if not kinds:
        raise WorkloadUnavailableError("none of its kinds of prompt can be had")
    warm = uncounted(kinds[0][:1])
    kinds[0] = kinds[0][1:]
    return warm + [prompt for prompt in chain(*zip_longest(*map(_trimmed(each), kinds))) if prompt is not None]


def _trimmed(count: int) -> Callable[[list[BenchPrompt]], list[BenchPrompt]]:
    """Cuts a list after its ``count``-th counted prompt: holes come by whole files."""

    def cut(prompts: list[BenchPrompt]) -> list[BenchPrompt]:
        counted = [i for i, prompt in enumerate(prompts) if prompt.counted]
        return prompts[: counted[count - 1] + 1] if len(counted) >= count else prompts

    return cut


_Make = Callable[[Tokenizer, int, int | None], list[BenchPrompt]]
_SESSIONS: dict[str, _Make] = {"fim": fim_prompts, "typing": typing_prompts}
_ONE_BY_ONE: dict[str, _Make] = {
    "humaneval": humaneval_prompts,
    "edit": edit_prompts,
    "chat": chat_prompts,
}


def make_workload(
    name: str,
    tokenizer: Tokenizer,
    count: int,
    max_tokens: int | None,
    note: Callable[[str], None],
    at_once: int = AT_ONCE,
) -> list[Workload]:
    """What ``name`` (of `WORKLOAD_NAMES` or `CONCURRENT_NAMES`) stands for: one workload, or each mix of `concurrent`.

    ``count`` prompts are counted, as far as there are so many; ``max_tokens`` replaces each workload's own limit; of
    concurrent ones ``at_once`` are asked at a time.
    ``note`` receives a message for every part that is left out, with the reason.

    Raises:
        WorkloadUnavailableError: nothing of it can be had.
        ValueError: there is no such workload.
    """
    if name == "concurrent":
        return _mixes(tokenizer, count, max_tokens, note, at_once)
    if name in CONCURRENT_NAMES:
        return [concurrent_workload(name.partition("/")[2], tokenizer, count, max_tokens, at_once=at_once)]
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


def _mixes(
    tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Callable[[str], None], at_once: int
) -> list[Workload]:
    found: list[Workload] = []
    for mix in MIXES:
        try:
            # One warm-up does for all: what it teaches is how much a full batch costs.
            found.append(concurrent_workload(mix, tokenizer, count, max_tokens, warm_up=not found, at_once=at_once))
        except WorkloadUnavailableError as error:
            note(f"concurrent/{mix}: {error}")
    if not found:
        raise WorkloadUnavailableError("none of its kinds of prompt can be had")
    return found
