"""Prompts within an objective of time: as much text as fits, cached text kept, and reading ahead beside it."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.auth.principal import Limits, Principal, set_caller
from server.completion import requests, time_budget
from server.completion.documents import ContextFile, FillMode, Gap
from server.completion.editor_session import EditorSession
from server.completion.next_edit import EditPlace, EditPrompt, RecentEdit
from server.completion.prompt_packer import PromptPacker
from server.completion.requests import LEAST_PRIORITY, CompletionOptions, RequestMaker
from server.completion.time_budget import (
    FINE_BUDGET,
    MOST_TOKENS,
    ComputedPrompts,
    Objective,
    budgets,
    cached_tokens,
    expected_ms,
)
from specdec.core.types import FinishReason, Request
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.scripted_engine import Machine, ScriptedEngine, budget_on
from verify_kernels.forward_batch import PAGE_SIZE

TIMES = (40.0, 52.0, 100.0, 292.0, 1060.0, 4132.0)  # 3 to 4 ms a token, as on a small CPU
SOURCE = inspect.getsource(random)
FILES = (ContextFile("b.py", "import a\n" * 20),)
GAP = Gap(SOURCE[:12000], SOURCE[12000:20000], files=FILES, path="a.py", repo="r")
PACKER = PromptPacker(CodeTokenizer(), 1 << 16)


@dataclass(frozen=True)
class Packed:
    ids: tuple[int, ...]
    n_healing_tokens: int = 0


def packed(budget: int) -> Packed:
    """A prompt that has nothing in common with those of other budgets."""
    return Packed(tuple(range(budget * 10_000, budget * 10_000 + budget)))


@given(
    ttft_ms=st.floats(1, 20_000), waits=st.tuples(st.floats(0, 2), st.floats(0, 0.01)), largest=st.integers(64, 8192),
    slow=st.floats(0.5, 8),
)  # fmt: skip
def test_the_prompt_fits_and_none_of_the_larger_budgets_does(
    ttft_ms: float, waits: tuple[float, float], largest: int, slow: float
) -> None:
    """Long prompts that wait delay a short one by its own length alone."""
    objective = budget_on(Machine(TIMES, *waits), slowdown=slow).objective("me", ttft_ms)
    assert objective is not None
    chosen = len(objective.choose(packed, largest).ids)
    cost = lambda tokens: slow * expected_ms(TIMES, tokens) + 1e3 * (waits[0] + waits[1] * tokens)  # noqa: E731
    choices = list(budgets(largest))
    assert cost(chosen) <= ttft_ms + 1e-6 or chosen == choices[-1]
    assert all(cost(larger) > ttft_ms - 1e-6 for larger in choices if larger > chosen)


def test_budgets_fall_by_coarse_steps_then_by_quanta() -> None:
    assert list(budgets(4096)) == [4096, 1024, 256, 224, 192, 160, 128, 96, 64, 32]
    assert list(budgets(70)) == [70, 64, 32]
    for tokens in (1, 4, 16, 64, 256, 1024):
        assert expected_ms(TIMES, tokens) == pytest.approx(TIMES[round(math.log(tokens, 4))])
    assert expected_ms(TIMES, 2048) > 2 * expected_ms(TIMES, 1000)


@given(times=st.lists(st.floats(1, 20_000), min_size=2, max_size=8), warm=st.sets(st.sampled_from([*budgets(2048)])))
def test_more_time_never_shortens_a_prompt(times: list[float], warm: set[int]) -> None:
    known = tuple(packed(budget).ids for budget in warm)
    lengths = [len(Objective(ms, TIMES, known).choose(packed, 2048).ids) for ms in sorted(times)]
    assert lengths == sorted(lengths)


@given(ttft_ms=st.floats(45, 20_000), warm=st.sampled_from([*budgets(2048)]))
def test_a_cached_prompt_is_taken_whole(ttft_ms: float, warm: int) -> None:
    chosen = Objective(ttft_ms, TIMES, (packed(warm).ids,)).choose(packed, 2048).ids
    assert chosen == packed(warm).ids or len(chosen) > 2 * warm
    cold = Objective(ttft_ms, TIMES, ()).choose(packed, 2048).ids
    assert len(chosen) >= len(cold) / 2  # a short prompt is no reason to leave out much text that there is time for


@given(st.lists(st.integers(0, 1), max_size=300), st.lists(st.integers(0, 1), max_size=300), st.integers(0, 300))
def test_cached_tokens_are_whole_pages_or_a_whole_prompt(known: list[int], other: list[int], shared: int) -> None:
    ids = tuple(known[:shared] + other)
    equal = next((i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids)))
    whole = equal == len(known)
    assert cached_tokens([tuple(known)], ids) == (equal if whole else equal // PAGE_SIZE * PAGE_SIZE)


def test_the_prompts_of_many_owners_and_long_ones_are_forgotten() -> None:
    computed = ComputedPrompts()
    for number in range(40):
        for turn in range(3):
            computed.add(f"owner {number}", (number, turn, *range(MOST_TOKENS // 32)))
        kept = [owner for owner in range(40) if computed.of(f"owner {owner}")]
        assert computed.n_tokens == sum(len(ids) for owner in kept for ids in computed.of(f"owner {owner}"))
        assert computed.n_tokens <= MOST_TOKENS
        assert kept == list(range(kept[0], number + 1))  # the oldest go
    computed.add("long", tuple(range(MOST_TOKENS + 1)))
    assert computed.of("long") == ()
    assert computed.n_tokens <= MOST_TOKENS


def request(ids: tuple[int, ...]) -> Request:
    return Request("r", ids, omitted=(0, 0, 0, 0))


def test_measured_times_correct_the_expected_ones() -> None:
    budget = budget_on(Machine(TIMES))
    chosen = []
    for _ in range(30):  # the machine is three times as slow as measured at start
        objective = budget.objective("me", 400.0)
        assert objective is not None
        ids = objective.choose(packed, 2048).ids
        chosen.append(len(ids))
        budget.observe(f"other {len(chosen)}", request(ids), 0, 3 * expected_ms(TIMES, len(ids)))
    assert chosen == sorted(chosen, reverse=True)
    assert budget.slowdown == pytest.approx(3.0, rel=0.05)
    assert 3 * expected_ms(TIMES, chosen[-1]) <= 400 or chosen[-1] == 32
    assert budget_on(Machine()).objective("me", 1.0).choose(packed, 2048) == packed(2048)  # type: ignore[union-attr]


def test_an_evicted_prompt_is_forgotten() -> None:
    budget, ids = budget_on(Machine(TIMES)), packed(512).ids
    budget.observe("me", request(ids), 0, math.inf)
    assert cached_tokens(budget.computed.of("me"), ids) == 512
    assert cached_tokens(budget.computed.of("you"), ids) == 0
    budget.observe("me", request(packed(100).ids), 0, math.inf)
    budget.observe("me", request((*packed(100).ids[:70], 5)), 64, math.inf)  # takes the partial page behind the first
    assert cached_tokens(budget.computed.of("me"), packed(100).ids) == 64
    budget.observe("me", request(ids[:300]), 0, math.inf)  # none of it was cached
    assert cached_tokens(budget.computed.of("me"), ids) == 300
    assert len(budget.computed.of("me")) == 1


async def made(options: CompletionOptions, machine: Machine | None = None) -> Request:
    maker = RequestMaker(budget_on(machine or Machine(TIMES)))
    maker.packer = PACKER
    return await maker.make(GAP, options, "r")


async def test_the_request_says_what_was_left_out() -> None:
    whole, free = await made(CompletionOptions()), PACKER.pack(GAP, FillMode.MIDDLE, 2048, "")
    assert (whole.prompt_ids, whole.omitted) == (free.ids, None)  # without an objective nothing changes
    short, long = await made(CompletionOptions(ttft_ms=400)), await made(CompletionOptions(ttft_ms=1e6))
    assert long.prompt_ids == whole.prompt_ids
    for each in (short, long):
        assert each.omitted is not None
        text = bytes(i for i in each.prompt_ids if i < 256).decode() + each.healing_prefix
        prefix, suffix, files, edits = each.omitted
        lines = [GAP.prefix.count("\n"), GAP.suffix.count("\n"), 20]
        shown = sum(lines) - prefix - suffix - files
        assert shown <= text.count("\n") <= shown + 4  # names of files have lines of their own
        assert (0 <= prefix <= lines[0], 0 <= suffix <= lines[1], edits) == (True, True, 0)
        assert GAP.prefix.split("\n")[prefix][-8:] in text  # a part of the first line may be left out
    assert short.omitted > long.omitted  # type: ignore[operator]


def test_an_edit_leaves_out_files_then_edits() -> None:
    recent = tuple(RecentEdit("a.py", f"x = {i}\n", f"y = {i}\n") for i in range(4))
    place = EditPlace("a.py", "a = 1\n" * 9, 8, recent, FILES)
    prompt = EditPrompt(place, "m", CodeTokenizer(), PACKER)
    assert prompt.request(Request("r", ())).omitted is None
    found = []
    for ttft_ms in (1e6, 3000, 1500, 1000, 1):
        made = prompt.request(Request("r", ()), "", 4096, Objective(ttft_ms, TIMES, ()))
        assert made.omitted is not None
        assert place.shown(place.window).encode() in bytes(i for i in made.prompt_ids if i < 256)
        found.append(made.omitted)
    assert (found[0], found[-1]) == ((0, 0, 0, 0), (0, 0, 20, 4))
    assert found == sorted(found)
    assert all(lines == 20 for _, _, lines, edits in found if edits)


class Reading:
    """A session that reads ahead over a scripted engine."""

    def __init__(self, machine: Machine) -> None:
        self.engine, maker = ScriptedEngine(), RequestMaker(budget_on(machine))
        maker.packer = PACKER
        self.budget, self.engine.watch_prompt = maker.time, maker.time.watch
        session = EditorSession("s", maker, self.engine.admit)
        self.task = asyncio.create_task(session.read_ahead(GAP, CompletionOptions(ttft_ms=400), lambda _: None))

    async def settle(self) -> int:
        """Requests so far, once nothing more happens."""
        for _ in range(50):
            await asyncio.sleep(0)
        return len(self.engine.requests)


@pytest.mark.parametrize("keeps", [True, False])  # whether the engine has a prefix cache
async def test_reading_ahead_makes_the_whole_prompt_fit(keeps: bool) -> None:
    reading = Reading(Machine(TIMES))
    parts = []
    while not reading.task.done():
        async with asyncio.timeout(20):
            while len(reading.engine.requests) == len(parts) and not reading.task.done():
                await asyncio.sleep(0)
        if reading.task.done():
            break
        part = reading.engine.requests[-1]
        parts.append(part.request.prompt_ids)
        assert (part.request.priority, part.request.stopping.max_tokens) == (LEAST_PRIORITY, 0)
        cached = cached_tokens(reading.budget.computed.of(""), part.request.prompt_ids) if keeps else 0
        part.start(cached)
        part.finish(FinishReason.LENGTH, cached)
    if not keeps:
        assert len(parts[-1]) <= 2 * PAGE_SIZE  # the parts before are not computed again and again
        return
    full = PACKER.pack(GAP, FillMode.MIDDLE, 2048).ids
    assert parts[-1] == full
    assert len(parts[0]) <= 32  # small parts, of small prompts first
    assert max(len(ids) for ids in parts[:8]) <= FINE_BUDGET
    objective = reading.budget.objective("", 400.0)
    assert objective is not None
    assert objective.choose(lambda budget: PACKER.pack(GAP, FillMode.MIDDLE, budget), 2048).ids == full


async def test_reading_ahead_ends_at_the_most_tokens_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (time_budget, requests):
        monkeypatch.setattr(module, "MOST_TOKENS", 500, raising=False)
    reading = Reading(Machine(TIMES))
    async with asyncio.timeout(20):
        for number in range(200):
            while len(reading.engine.requests) == number and not reading.task.done():
                await asyncio.sleep(0)
            if reading.task.done():
                break
            part = reading.engine.requests[-1]
            cached = cached_tokens(reading.budget.computed.of(""), part.request.prompt_ids)
            part.start(cached)
            part.finish(FinishReason.LENGTH, cached)
    reading.task.cancel()
    assert number < 199
    assert len(part.request.prompt_ids) == 500


async def test_reading_ahead_waits_for_other_requests_and_ends_when_cancelled() -> None:
    machine = Machine(TIMES, in_flight=1)
    reading = Reading(machine)
    assert await reading.settle() == 0
    machine.in_flight = 0
    async with asyncio.timeout(20):
        while not reading.engine.requests:
            await asyncio.sleep(0.01)
    machine.in_flight = 1  # another request comes during the first part
    reading.engine.requests[0].start()
    reading.engine.requests[0].finish(FinishReason.LENGTH)
    assert await reading.settle() == 1
    machine.in_flight = 0
    async with asyncio.timeout(20):
        while len(reading.engine.requests) < 2:
            await asyncio.sleep(0.01)
    reading.task.cancel()
    await asyncio.wait([reading.task])
    assert reading.engine.requests[1].closed
    assert await reading.settle() == 2
    set_caller(Principal("me", limits=Limits(requests_per_minute=5)))
    limited = Reading(Machine())
    await limited.task
    assert not limited.engine.requests
