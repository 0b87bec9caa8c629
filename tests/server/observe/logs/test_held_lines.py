"""Lines that wait a moment: none is lost, and each has its own time."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

from server.observe.logs import HELD_S, HeldLines
from tests.server.observe.logs.capture import Lines, logged

LOGGER = "specdec.calls"


def numbers(lines: Lines) -> list[int]:
    return [line["number"] for line in lines.of("call")]


def say(held: HeldLines, number: int, at_s: float = 1e9) -> None:
    held.say("call", at_s, lambda: {"number": number})


async def test_in_an_event_loop_they_come_together_in_order_a_moment_later() -> None:
    with logged() as lines:
        held = HeldLines(logging.getLogger(LOGGER))
        for number in range(3):
            say(held, number)
        assert numbers(lines) == []
        while len(numbers(lines)) < 3:
            await asyncio.sleep(HELD_S)
        say(held, 3)
        assert numbers(lines) == [0, 1, 2]
        held.close()
        assert numbers(lines) == [0, 1, 2, 3]
        say(held, 4)  # a call that ends after the server
        assert numbers(lines) == [0, 1, 2, 3, 4]


def test_without_an_event_loop_they_come_at_once_with_the_time_they_are_of() -> None:
    with logged() as lines:
        say(HeldLines(logging.getLogger(LOGGER)), 1, 1_700_000_000.25)
    (line,) = lines.of("call", number=1)
    assert datetime.fromisoformat(line["time"]) == datetime.fromtimestamp(1_700_000_000.25, UTC)


def test_text_for_people_has_that_time_too() -> None:
    with logged("text") as lines:
        say(HeldLines(logging.getLogger(LOGGER)), 1, 1_700_000_000.25)
    assert ",250 INFO specdec.calls: call number=1" in lines.text


def test_a_line_that_can_not_be_made_costs_no_other() -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("no such thing")

    async def both(held: HeldLines) -> None:
        held.say("call", 1e9, broken)
        say(held, 2)

    with logged() as lines:
        held = HeldLines(logging.getLogger(LOGGER))
        asyncio.run(both(held))  # the loop ends before they are due
        held.close()
        assert numbers(lines) == [2]
        assert "no such thing" in lines.text


def test_what_nobody_would_see_is_not_wanted() -> None:
    with logged(level=logging.WARNING):
        assert not HeldLines(logging.getLogger(LOGGER)).wanted
    with logged():
        assert HeldLines(logging.getLogger(LOGGER)).wanted
