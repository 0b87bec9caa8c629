"""The workloads of an engine by name, also those that mix kinds of prompts or run several at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain, zip_longest

from bench.workloads import CONCURRENT_NAMES, FETCHED_NAMES, WORKLOAD_NAMES
from bench.workloads.next_edit import edit_prompts
from bench.workloads.prompts import KINDS, tokenised
from bench.workloads.workload import Workload, WorkloadUnavailableError, uncounted
from specdec.errors import ConfigError
from specdec.load.request import LoadRequest
from specdec.models.tokenizer import Tokenizer

AT_ONCE = 8
EDIT_TOKENS = 256  # longest edit in a concurrent workload
TURNS = 3  # requests per place: with one, the figure is how long the slowest of them runs alone
WARM_UP_TOKENS = 24
SESSIONS = ("fim", "typing")  # kinds that come with warm-ups of their own
Note = Callable[[str], None]


def prompts_of(kind: str, tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[LoadRequest]:
    """``count`` prompts of a kind, or all, and the warm-ups of their sessions; HumanEval's are spread evenly over its
    problems.

    Raises:
        ConfigError: there is no such kind.
        WorkloadUnavailableError: the prompts are not installed, or the model cannot use them.
    """
    if kind in FETCHED_NAMES:
        return edit_prompts(tokenizer, count, max_tokens)
    if kind not in KINDS:
        known = ", ".join(WORKLOAD_NAMES + FETCHED_NAMES)
        raise ConfigError(f"no workload {kind!r}; there are {known}")
    requests = list(KINDS[kind](max_tokens))
    if kind == "humaneval":
        count = min(count, len(requests))
        requests = [requests[i * len(requests) // count] for i in range(count)]
    before = accumulate((request.counted for request in requests), initial=0)
    return [tokenised(request, tokenizer) for request, n in zip(requests, before, strict=False) if n < count]


def make_workload(
    name: str, tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Note, at_once: int = AT_ONCE
) -> Workload:
    """The workload ``name`` (see `bench.workloads`).

    count: counted prompts, as far as there are so many. max_tokens: replaces each workload's own limit. note: receives
    every omitted part with the reason. at_once: concurrent prompts of a concurrent workload.

    Raises:
        ConfigError: there is no such workload.
        WorkloadUnavailableError: no part of it is available.
    """
    if name in CONCURRENT_NAMES:
        return _concurrent(name, tokenizer, count, max_tokens, note, at_once)
    if name == "mixed":
        prompts = _mixed(tokenizer, count, max_tokens, note)
    elif name in SESSIONS:
        prompts = prompts_of(name, tokenizer, count, max_tokens)
    else:
        prompts = prompts_of(name, tokenizer, count + 1, max_tokens)
        prompts = uncounted(prompts[:1]) + prompts[1:]
    return Workload(name, tuple((prompt,) for prompt in prompts))


def _concurrent(
    name: str, tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Note, at_once: int
) -> Workload:
    """``count`` prompts, at least `TURNS` times ``at_once``, after a short round as warm-up. If the data set has too
    few prompts for both, the warm-up has fewer, at least one.

    Raises:
        WorkloadUnavailableError: there are fewer prompts than ``at_once`` places.
    """
    mix = name.partition("/")[2]
    number = max(count, TURNS * at_once) + at_once
    kinds = ("edit", "chat", "humaneval") if mix == "mixed" else (mix,)
    found = [
        prompts_of(kind, tokenizer, -(-number // len(kinds)), max_tokens or (EDIT_TOKENS if kind == "edit" else None))
        for kind in kinds
    ]
    prompts = _in_turn(found)[:number]
    warm = min(at_once, max(1, len(prompts) - TURNS * at_once))
    counted = len(prompts) - warm
    if counted < at_once:
        raise WorkloadUnavailableError(f"there are {counted} prompts beside the warm-up, too few for {at_once} at once")
    if counted < TURNS * at_once:
        missing = f"{TURNS * at_once - counted} of {TURNS * at_once} planned requests"
        note(f"{name}: {missing}, because there are only {counted} prompts")
    groups = (tuple(uncounted(prompts[:warm], WARM_UP_TOKENS)), tuple(prompts[warm:]))
    return Workload(name, groups, at_once)


def _mixed(tokenizer: Tokenizer, count: int, max_tokens: int | None, note: Note) -> list[LoadRequest]:
    """About ``count`` prompts, of every kind in turn, after a warm-up of the first kind."""
    kinds = ("humaneval", "edit", "fim", "chat")
    each = -(-count // len(kinds))
    warm: list[LoadRequest] = []
    found: list[list[LoadRequest]] = []
    for kind in kinds:
        try:
            prompts = prompts_of(kind, tokenizer, each + (not found), max_tokens)
        except WorkloadUnavailableError as error:
            note(f"mixed: {error}")
            continue
        if not found:
            warm, prompts = uncounted(prompts[:1]), prompts[1:]
        found.append(prompts)
    if not found:
        raise WorkloadUnavailableError("none of its kinds of prompts is available")
    return warm + _in_turn(found)


def _in_turn(kinds: list[list[LoadRequest]]) -> list[LoadRequest]:
    return [prompt for prompt in chain(*zip_longest(*kinds)) if prompt is not None]
