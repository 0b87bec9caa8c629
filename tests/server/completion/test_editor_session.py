"""Sessions: a suggestion that matches the typed text continues, any other is cancelled, and no request is leaked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.completion.documents import MAX_CHARACTERS, ContextFile, Gap, TextDocument
from server.completion.editor_session import DOCUMENTS, EditorSession, Suggestion
from server.completion.requests import CompletionOptions
from specdec.core.types import FinishReason, Request, SamplingParams, StoppingParams
from specdec.errors import FieldViolation, InvalidRequestError, QueueFullError, RequestError
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.scripted_engine import ScriptedEngine, sessions_on

OPTIONS = CompletionOptions(replace(CompletionOptions().base, session="s"))
GAP = Gap("def add(a, b):\n    re", "\n\nprint(add(1, 2))\n")


def based(**base: Any) -> CompletionOptions:
    """`OPTIONS` with other fields of the request."""
    return replace(OPTIONS, base=replace(OPTIONS.base, **base))


def accept(request: Request) -> None:
    """Refuses nothing."""


class Desk:
    """A session over a scripted engine."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.session: EditorSession = sessions_on(self.engine).open("", "s")

    async def ask(self, gap: Gap, options: CompletionOptions = OPTIONS) -> Suggestion:
        return await self.session.suggest(gap, options, accept)

    def typed(self, text: str) -> Gap:
        return replace(GAP, prefix=GAP.prefix + text)


async def read(suggestion: Suggestion) -> str:
    return "".join([text async for text in suggestion.texts()])


async def settle() -> None:
    """Let every task come to rest."""
    for _ in range(20):
        await asyncio.sleep(0)


async def generate(desk: Desk, text: str, *, done: bool = False) -> None:
    """The first request generates ``text``."""
    await desk.ask(GAP)
    desk.engine.requests[0].say(text)
    if done:
        desk.engine.requests[0].finish()
    await settle()


async def test_complete_suggestion() -> None:
    desk = Desk()
    suggestion = await desk.ask(GAP)
    request = desk.engine.last.request
    assert (suggestion.continued, suggestion.typed, request.session) == (False, 0, "s")
    assert request.stopping.rules is not None
    assert request.stopping.rules.min_indent == 4
    desk.engine.last.say("turn ")
    desk.engine.last.say("a + b")
    desk.engine.last.finish()
    assert [text async for text in suggestion.texts()] == ["turn a + b"]
    assert (suggestion.text, suggestion.reason) == ("turn a + b", FinishReason.EOS)
    assert suggestion.finished is not None
    assert desk.engine.running == 0


async def test_typed_text_that_matches_the_generation_is_skipped() -> None:
    desk = Desk()
    await generate(desk, "turn a")
    suggestion = await desk.ask(desk.typed("tur"))
    reading = asyncio.create_task(read(suggestion))
    await settle()
    desk.engine.requests[0].say(" + b")
    desk.engine.requests[0].finish()
    assert await reading == "n a + b"
    assert (suggestion.continued, suggestion.typed) == (True, 3)
    assert len(desk.engine.requests) == 1


async def test_a_complete_suggestion_is_typed_through_without_the_engine() -> None:
    desk = Desk()
    await generate(desk, "turn a + b", done=True)
    for typed in ("t", "turn a", "turn a + "):
        suggestion = await desk.ask(desk.typed(typed))
        assert await read(suggestion) == "turn a + b"[len(typed) :]
        assert suggestion.reason is FinishReason.EOS
    assert len(desk.engine.requests) == 1
    await desk.ask(desk.typed("turn a + b"))  # nothing is left of it
    assert len(desk.engine.requests) == 2


async def test_typing_ahead_of_the_generation_waits_for_it() -> None:
    desk = Desk()
    await generate(desk, "tu")
    asking = asyncio.create_task(desk.ask(desk.typed("turn a")))
    await settle()
    assert not asking.done()
    desk.engine.requests[0].say("rn ")
    desk.engine.requests[0].say("a + b")
    suggestion = await asking
    desk.engine.requests[0].finish()
    assert await read(suggestion) == " + b"
    assert len(desk.engine.requests) == 1


async def test_before_the_first_token_any_typing_starts_a_new_generation() -> None:
    desk = Desk()
    await desk.ask(GAP)
    desk.engine.last.start()
    await settle()
    suggestion = await desk.ask(desk.typed("t"))
    assert not suggestion.continued
    assert [request.closed for request in desk.engine.requests] == [True, False]


@pytest.mark.parametrize("how", ["other", "ends", "fails", "far"])
async def test_typing_that_differs_starts_a_new_generation(how: str) -> None:
    desk = Desk()
    await generate(desk, "tu")
    typed = "turn a" if how != "far" else "turn " + "a" * 20
    asking = asyncio.create_task(desk.ask(desk.typed(typed)))
    await settle()
    if how == "other":
        desk.engine.requests[0].say("ne")
    elif how == "ends":
        desk.engine.requests[0].finish()
    elif how == "fails":
        desk.engine.requests[0].fail(RequestError("broken"))
    suggestion = await asking
    assert not suggestion.continued
    assert not desk.engine.requests[0].samples_left
    desk.engine.requests[1].say(" + c")
    desk.engine.requests[1].finish()
    assert await read(suggestion) == " + c"


CHANGES = {
    "suffix": (replace(GAP, suffix=")" + GAP.suffix), OPTIONS),
    "text above": (replace(GAP, prefix="import os\n" + GAP.prefix), OPTIONS),
    "removed": (replace(GAP, prefix=GAP.prefix[:-1]), OPTIONS),
    "path": (replace(GAP, path="other.py"), OPTIONS),
    "options": (GAP, based(sampling=SamplingParams(temperature=0, top_k=3))),
    "stops": (GAP, based(stopping=StoppingParams(max_tokens=5))),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_any_other_change_cancels_the_generation_first(change: str) -> None:
    desk = Desk()
    await generate(desk, "turn a")
    gap, options = CHANGES[change]
    suggestion = await desk.ask(gap, options)
    assert not suggestion.continued
    assert [request.closed for request in desk.engine.requests] == [True, False]


async def test_changes_of_other_files_keep_the_generation() -> None:
    desk = Desk()
    await generate(desk, "turn a")
    suggestion = await desk.ask(replace(desk.typed("t"), files=(ContextFile("x.py", "x"),)))
    assert suggestion.continued


async def test_a_repeated_request_at_the_same_place() -> None:
    desk = Desk()
    await generate(desk, "turn", done=True)
    again = await desk.ask(GAP)
    assert (again.continued, await read(again)) == (True, "turn")
    chance = based(sampling=SamplingParams(temperature=1.0))
    for count in (2, 3):  # with a random seed, a repeated request is a new one
        await desk.ask(GAP, chance)
        assert len(desk.engine.requests) == count
        desk.engine.last.finish()
        await settle()


async def test_a_generation_that_timed_out_is_retried() -> None:
    desk = Desk()
    await desk.ask(GAP)
    desk.engine.last.say("tu")
    desk.engine.last.finish(FinishReason.TIME_LIMIT)
    await settle()
    typed = await desk.ask(desk.typed("t"))
    assert (typed.continued, await read(typed)) == (True, "u")
    again = await desk.ask(GAP)
    assert not again.continued


async def test_stop_rules_of_the_cursor_cut_a_continued_generation() -> None:
    desk = Desk()
    gap = Gap("if x:\n    ", "\n")
    options = replace(OPTIONS, suffix=False)
    first = await desk.ask(gap, options)
    desk.engine.last.say("for y in x:\n        print(y)\n    return")
    await settle()
    deeper = replace(gap, prefix=gap.prefix + "for y in x:\n        p")
    suggestion = await desk.ask(deeper, options)
    assert await read(suggestion) == "rint(y)"  # a fresh request ends where the line leaves its block
    assert suggestion.reason is FinishReason.INDENT
    assert desk.engine.requests[0].closed
    assert first.text == ""
    on = await desk.ask(replace(deeper, prefix=deeper.prefix + "rint"), options)
    assert (await read(on), on.reason) == ("(y)", FinishReason.INDENT)
    assert len(desk.engine.requests) == 1


# The text before the cursor, the word in which it ends, the text expected after it, the former suggestion
DRAFTS = {
    "renamed": (GAP.prefix + "turn c", " c", " + b", "turn a + b"),
    "typed through": (GAP.prefix + "turn a + b", "", "", "turn a + b"),
    "in part": (GAP.prefix + "tu", " retu", "rn a", "turn a"),
    "another word": (GAP.prefix + "peat", " repeat", " a", "turn a"),
    "taken back": (GAP.prefix[:-2], " ", "return a", "turn a"),
    "elsewhere": ("x = ", "", "", "turn a"),
    "far": (GAP.prefix + "x" * 300, "", "", "turn a"),
}


@pytest.mark.parametrize("how", DRAFTS)
async def test_the_rest_of_the_last_suggestion_is_the_next_prediction(how: str) -> None:
    desk = Desk()
    prefix, word, draft, text = DRAFTS[how]
    await generate(desk, text, done=how != "in part")
    gap = replace(GAP, prefix=prefix)
    await desk.ask(gap if how != "in part" else replace(gap, suffix="\n"))
    request = desk.engine.last.request
    assert bytes(request.prediction_ids).decode() == word + draft
    assert not draft or request.healing_prefix == word


async def test_an_empty_suggestion_does_not_replace_the_prediction() -> None:
    desk = Desk()
    await generate(desk, "turn a")
    for prefix in (GAP.prefix + "x", GAP.prefix + "xy"):
        await desk.ask(replace(GAP, prefix=prefix))
        assert bytes(desk.engine.last.request.prediction_ids).decode() == " re" + prefix[len(GAP.prefix) :] + " a"


async def test_a_rejected_request_leaves_nothing_running() -> None:
    desk = Desk()
    await generate(desk, "turn a")

    def refuse(request: Request) -> None:
        raise InvalidRequestError([FieldViolation("x", "bad")])

    with pytest.raises(InvalidRequestError):
        await desk.session.suggest(Gap("other"), OPTIONS, refuse)
    desk.engine.refusal = QueueFullError(1, 1.0)
    with pytest.raises(QueueFullError):
        await desk.ask(Gap("other"))
    assert desk.engine.running == 0
    desk.engine.refusal = None
    suggestion = await desk.ask(GAP)
    desk.engine.last.fail(QueueFullError(1, 1.0))
    with pytest.raises(QueueFullError):
        await read(suggestion)


@pytest.mark.parametrize("typed", ["turn a", "xxx"])
async def test_cancelling_a_request_at_any_point(typed: str) -> None:
    for steps in range(12):
        desk = Desk()
        await generate(desk, "tu")
        asking = asyncio.create_task(desk.ask(desk.typed(typed)))
        for _ in range(steps):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        desk.session.stop()
        await settle()
        assert desk.engine.running == 0


@given(
    says=st.text("ab\n ()", min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    typed=st.lists(st.integers(0, 30), max_size=4),
    early=st.booleans(),
)
def test_typing_through_equals_a_fresh_request(says: str, cuts: list[int], typed: list[int], early: bool) -> None:
    """The engine generates ``says`` at the cursor. However it is split and whenever the pieces arrive, each request
    gets the part of it that follows the typed text."""
    plain = replace(OPTIONS, dedent=False, bracket=False, suffix=False)

    async def scenario() -> None:
        desk = Desk()
        await desk.ask(GAP, plain)
        places = sorted({0, len(says), *(min(cut, len(says)) for cut in cuts)})
        pieces = [says[a:b] for a, b in pairwise(places)]
        if not early:
            for piece in pieces:
                desk.engine.requests[0].say(piece)
            desk.engine.requests[0].finish()
            await settle()
        else:
            desk.engine.requests[0].say(pieces.pop(0))
            await settle()
        for length in sorted(min(t, len(says) - 1) for t in typed):
            asking = asyncio.create_task(desk.ask(desk.typed(says[:length]), plain))
            while early and pieces and not asking.done():
                desk.engine.requests[0].say(pieces.pop(0))
                await settle()
            suggestion = await asking
            reading = asyncio.create_task(read(suggestion))
            await settle()
            if early:
                for piece in pieces:
                    desk.engine.requests[0].say(piece)
                pieces.clear()
                desk.engine.requests[0].finish()
            assert await reading == says[length:]
        assert len(desk.engine.requests) == 1

    asyncio.run(scenario())


def test_documents_are_bounded() -> None:
    desk = Desk.__new__(Desk)
    desk.engine = ScriptedEngine()
    session = sessions_on(desk.engine, CodeTokenizer()).open("", "s")
    for i in range(20):
        session.keep(f"{i}", TextDocument("x" * 1000, 1))
    assert list(session.documents) == [f"{i}" for i in range(20 - DOCUMENTS, 20)]
    session.keep("big", TextDocument("x" * (MAX_CHARACTERS - 1500), 1))
    assert list(session.documents) == ["19", "big"]
    session.keep("bigger", TextDocument("x" * MAX_CHARACTERS, 1))
    assert list(session.documents) == ["bigger"]


@pytest.mark.parametrize(("allowed", "healed"), [((), " retu"), ((48, 49), "")])
async def test_no_word_is_healed_where_tokens_are_allowed_one_by_one(allowed: tuple[int, ...], healed: str) -> None:
    desk = Desk()
    options = based(sampling=SamplingParams(temperature=0.0, allowed_token_ids=allowed))
    await desk.ask(replace(GAP, prefix=GAP.prefix + "tu"), options)
    assert desk.engine.last.request.healing_prefix == healed
