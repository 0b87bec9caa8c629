"""The prompts of `bench.workloads` as texts, conversations and gaps, for servers that tokenise themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import chain, count, islice, zip_longest

from bench.serve import SERVE_WORKLOADS
from bench.serve.ask import Ask
from bench.texts import long_text
from bench.workloads import chat, edit, fim, humaneval
from bench.workloads.keystrokes import TYPED
from bench.workloads.sources import source_of
from bench.workloads.workload_unavailable_error import WorkloadUnavailableError
from specdec.client import ChatTurn, Fim

PREFIX_CHARACTERS, SUFFIX_CHARACTERS = 4000, 1200
SHARED_CHARACTERS, SHARED_TOKENS = 8000, 64
CHARACTERS_PER_TOKEN = 3  # of code; only bounds how long an edited text may get


def endless_asks(name: str, max_tokens: int | None = None, note: Callable[[str], None] | None = None) -> Iterator[Ask]:
    """The prompts of workload ``name`` (one of `SERVE_WORKLOADS`), round after round. From the second round on each
    begins differently and has a salt of its own, so that none is answered from the cache or drafted from the answers of
    the one before. Only a shared prefix stays shared.

    max_tokens: instead of each workload's own limit. note: is told of kinds that are left out of "mixed", and why.

    Raises:
        WorkloadUnavailableError: the prompts are not installed.
        ValueError: there is no such workload.
    """
    asks = _one_round(name, max_tokens, note or (lambda line: None))
    return chain(asks, (_varied(ask, number) for number in count(2) for ask in asks))


def make_asks(name: str, number: int, max_tokens: int | None = None) -> list[Ask]:
    """The first ``number`` of `endless_asks`; raises as it does."""
    return list(islice(endless_asks(name, max_tokens), number))


def _one_round(name: str, max_tokens: int | None, note: Callable[[str], None]) -> list[Ask]:
    if name == "mixed":
        kinds: list[list[Ask]] = []
        for kind in ("humaneval", "edit", "fim", "chat"):
            try:
                kinds.append(_one_round(kind, max_tokens, note))
            except WorkloadUnavailableError as error:
                note(f"mixed: {error}")
        return [ask for ask in chain(*zip_longest(*kinds)) if ask is not None]
    makers: dict[str, Callable[[int | None], Iterator[Ask]]] = {
        "humaneval": _humaneval, "edit": _edit, "fim": _fim, "typing": _typing, "chat": _chat,
        "shared-prefix": _shared_prefix,
    }  # fmt: skip
    if name not in makers:
        raise ValueError(f"{name}: no such workload; there are {', '.join(SERVE_WORKLOADS)}")
    # Of a short line two states of typing may be the same.
    return list({(ask.text, ask.chat, ask.gap): ask for ask in makers[name](max_tokens)}.values())


def _humaneval(max_tokens: int | None) -> Iterator[Ask]:
    limit = max_tokens or humaneval.MAX_TOKENS
    for problem in humaneval.read_problems():
        yield Ask(problem["task_id"], limit, text=problem["prompt"], stop=humaneval.STOPS)


def _chat(max_tokens: int | None) -> Iterator[Ask]:
    for number, question in enumerate(chat.QUESTIONS):
        yield Ask(f"chat/{number}", max_tokens or chat.MAX_TOKENS, chat=(ChatTurn("user", question),))


def _edit(max_tokens: int | None) -> Iterator[Ask]:
    for place, wish in edit.EDITS:
        old = source_of(place)
        part = "file" if place.endswith(":") else "code"
        question = f"{wish} Return the whole {part}, only code, without an explanation.\n\n```python\n{old}```"
        room = len(old) // CHARACTERS_PER_TOKEN * 5 // 4 + edit.MARGIN
        limit = min(max_tokens or edit.MAX_TOKENS, room)
        yield Ask(f"edit/{place}", limit, chat=(ChatTurn("user", question),), prediction=old)


def _fim(max_tokens: int | None) -> Iterator[Ask]:
    for place in fim.FILES:
        source = source_of(place)
        for hole in fim.find_holes(source, fim.HOLES + 1):
            name = f"fim/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}"
            yield _gap(name, source, hole, 0.0, max_tokens, place)


def _typing(max_tokens: int | None) -> Iterator[Ask]:
    for place in fim.FILES:
        source = source_of(place)
        for hole in fim.find_holes(source, fim.HOLES):
            for typed in TYPED:
                name = f"typing/{place.removesuffix(':')}.py:{hole.first + 1}-{hole.end}+{typed:.0%}"
                yield _gap(name, source, hole, typed, max_tokens, place)


def _gap(name: str, source: str, hole: fim.Hole, typed: float, max_tokens: int | None, session: str) -> Ask:
    lines = source.splitlines(keepends=True)
    missing = "".join(lines[hole.first : hole.end])
    indent = len(missing) - len(missing.lstrip())
    there = missing[: indent + int(typed * len(missing.strip()))]
    prefix = ("".join(lines[: hole.first]) + there)[-PREFIX_CHARACTERS:]
    suffix = ("\n" + "".join(lines[hole.end :]))[:SUFFIX_CHARACTERS]
    return Ask(name, max_tokens or fim.MAX_TOKENS, gap=Fim(prefix, suffix), stop=("\n\n",), session=session)


def _shared_prefix(max_tokens: int | None) -> Iterator[Ask]:
    """One long text, and a different question about it each time."""
    shared = long_text()[:SHARED_CHARACTERS]
    for number, question in enumerate(chat.QUESTIONS):
        text = f"{shared}\n\n# Note {number}: {question}\n# Answer:"
        yield Ask(f"shared-prefix/{number}", max_tokens or SHARED_TOKENS, text=text)


def _varied(ask: Ask, number: int) -> Ask:
    name = f"{ask.name}#{number}"
    if ask.name.startswith("shared-prefix/"):
        text = ask.text.replace("\n# Answer:", f" ({number})\n# Answer:")
        return dataclasses.replace(ask, name=name, text=text)
    mark, fresh = f"# Round {number}\n", dataclasses.replace(ask, name=name, salt=f"round-{number}")
    if ask.gap is not None:
        return dataclasses.replace(fresh, gap=dataclasses.replace(ask.gap, prefix=mark + ask.gap.prefix))
    if ask.chat:
        first = ask.chat[0]
        return dataclasses.replace(fresh, chat=(ChatTurn(first.role, mark + first.content), *ask.chat[1:]))
    return dataclasses.replace(fresh, text=mark + ask.text)
