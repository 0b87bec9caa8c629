"""Anthropic's own Python client against a real server and a real model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.third_party_clients.conftest import MODEL
from tests.third_party_clients.tools.conftest import Drive

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(drive: Drive) -> dict[str, Any]:
    """All that the client saw."""
    found: dict[str, Any] = drive("drive_anthropic.py")
    return found


def test_text_is_the_same_complete_and_streamed(seen: dict[str, Any]) -> None:
    whole, final = seen["text"]["whole"], seen["text"]["final"]
    (block,) = whole["content"]
    assert block["type"] == "text"
    assert block["text"] == "".join(seen["text"]["pieces"]) == final["content"][0]["text"] != ""
    assert whole["model"] == MODEL
    assert whole["stop_reason"] == final["stop_reason"]
    for message in (whole, final):
        usage = message["usage"]
        assert 0 < usage["output_tokens"] <= 24
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 0
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_tool_is_called_and_its_result_used(seen: dict[str, Any]) -> None:
    found = seen["tools"]
    assert (found["name"], found["called"]["stop_reason"], found["streamed"]["stop_reason"]) == (
        "get_weather", "tool_use", "tool_use",
    )  # fmt: skip
    assert isinstance(found["input"]["city"], str)
    (streamed,) = [block for block in found["streamed"]["content"] if block["type"] == "tool_use"]
    assert streamed["input"] == found["input"]
    assert "input_json" in found["kinds"]
    assert "".join(block["text"] for block in found["said"]["content"])


def test_the_clients_loop_sends_the_conversation_with_each_result(seen: dict[str, Any]) -> None:
    first, second = seen["runner"]["turns"]
    assert first["stop_reason"] == "tool_use"
    sizes = [
        sum(turn["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) for turn in (first, second)
    ]
    assert sizes[1] > sizes[0]


def test_formats_stops_and_prefills(seen: dict[str, Any]) -> None:
    assert json.loads(seen["form"]["content"][0]["text"]) in ({"colour": "red"}, {"colour": "blue"})
    assert seen["form"]["stop_reason"] == "end_turn"
    assert (seen["stopped"]["stop_reason"], seen["stopped"]["stop_sequence"].lower()) == ("stop_sequence", "three")
    assert "four" in seen["begun"]["content"][0]["text"].lower()
    assert seen["count"] == sum(seen["stopped"]["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))


def test_the_models_have_names_and_times(seen: dict[str, Any]) -> None:
    (card,) = seen["models"]
    assert card[:2] == [MODEL, MODEL]
    assert card[2] >= 2025


def test_the_client_raises_its_own_errors(seen: dict[str, Any]) -> None:
    missing, bad = seen["missing"], seen["bad"]
    assert (missing["kind"], missing["status"], missing["body"]["error"]["type"]) == (
        "NotFoundError", 404, "not_found_error",
    )  # fmt: skip
    assert (bad["kind"], bad["status"], bad["body"]["error"]["param"]) == ("BadRequestError", 400, "temperature")
    assert missing["id"] != bad["id"]
