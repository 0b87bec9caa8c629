"""OpenAI's own Python client on /v1/responses of a real server with a real model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.third_party_clients.conftest import MODEL
from tests.third_party_clients.tools.conftest import Drive

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(drive: Drive) -> dict[str, Any]:
    """All that the client saw."""
    found: dict[str, Any] = drive("drive_responses.py")
    return found


def test_text_is_the_same_complete_and_streamed(seen: dict[str, Any]) -> None:
    found = seen["text"]
    assert found["text"] == "".join(found["pieces"]) == found["last"]["output"][0]["content"][0]["text"] != ""
    assert found["whole"]["model"] == MODEL
    assert found["whole"]["store"] is False
    assert found["whole"]["usage"]["output_tokens"] == found["last"]["usage"]["output_tokens"] > 0
    assert found["whole"]["status"] == found["last"]["status"]
    # How many tokens a step brings depends on its drafts: the deltas may be cut otherwise each time.
    assert [*dict.fromkeys(found["kinds"])] == [*dict.fromkeys(found["raw"])] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done",
        f"response.{found['last']['status']}",
    ]  # fmt: skip


def test_a_function_is_called_and_its_result_used(seen: dict[str, Any]) -> None:
    found = seen["tools"]
    assert isinstance(found["arguments"]["city"], str)
    assert found["called"]["status"] == "completed"
    (streamed,) = [item for item in found["streamed"]["output"] if item["type"] == "function_call"]
    (called,) = [item for item in found["called"]["output"] if item["type"] == "function_call"]
    assert (streamed["name"], streamed["arguments"]) == (called["name"], called["arguments"])
    assert "response.function_call_arguments.delta" in found["kinds"]
    assert found["kinds"][-1] == "response.completed"
    assert found["said"]


def test_structured_answers(seen: dict[str, Any]) -> None:
    assert seen["parsed"]["colour"] in ("red", "blue")
    assert (seen["completed"]["status"], seen["completed"]["incomplete_details"]) == ("completed", None)


def test_the_client_raises_its_own_errors(seen: dict[str, Any]) -> None:
    assert seen["state"] == {
        "kind": "BadRequestError", "status": 400, "code": "invalid_argument", "param": "previous_response_id",
    }  # fmt: skip
    assert (seen["embedding"]["kind"], seen["embedding"]["code"]) == (
        "UnprocessableEntityError", "embeddings_not_supported",
    )  # fmt: skip
