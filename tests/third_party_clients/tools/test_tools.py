"""Tools of /v1/chat/completions with the clients of OpenAI, LangChain, Mistral and Vercel's AI SDK, on a real model."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.third_party_clients.conftest import MODEL
from tests.third_party_clients.node_packages import fetched
from tests.third_party_clients.tools.conftest import Drive

pytestmark = pytest.mark.slow
CITIES, UNITS = ("Paris", "Rome"), ("celsius", "kelvin")


@pytest.fixture(scope="module")
def seen(drive: Drive) -> dict[str, Any]:
    """All that the Python clients saw."""
    found: dict[str, Any] = drive("drive_tools.py")
    return found


def is_answer(arguments: dict[str, Any]) -> bool:
    """Whether they follow the schema."""
    return set(arguments) == {"city", "unit"} and arguments["city"] in CITIES and arguments["unit"] in UNITS


def test_openai(seen: dict[str, Any]) -> None:
    found = seen["openai"]
    assert found["called"]["finish_reason"] == found["streamed"]["finish_reason"] == "tool_calls"
    functions = []
    for name in ("called", "streamed"):
        (call,) = found[name]["message"]["tool_calls"]
        functions.append({key: call["function"][key] for key in ("name", "arguments")})
    assert functions[0] == functions[1]
    assert functions[0]["name"] == "get_weather"
    assert is_answer(json.loads(functions[0]["arguments"]))
    assert "tool_calls.function.arguments.delta" in found["kinds"]
    assert found["said"]
    assert found["refused"] == ["tool_choice.function.name", "tools[1].function.name", "tool_choice"]


def test_langchain(seen: dict[str, Any]) -> None:
    found = seen["langchain"]
    (called,), (streamed,) = found["called"], found["streamed"]
    assert (called["name"], called["args"]) == (streamed["name"], streamed["args"])
    assert is_answer(called["args"])
    assert (found["invalid"], found["reason"]) == ([], "tool_calls")
    assert found["said"]
    assert is_answer(found["structured"])


def test_mistral(seen: dict[str, Any]) -> None:
    found = seen["mistral"]
    assert found["name"] == "get_weather"
    assert is_answer(found["arguments"])
    assert found["streamed"] == ["get_weather", json.dumps(found["arguments"])]
    assert found["reason"] == found["end"] == "tool_calls"
    assert found["said"]


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")
def test_ai_sdk(url: str) -> None:
    folder = fetched(Path(__file__).parent / "ai_sdk", "drive.mjs")
    command = ["node", "drive.mjs", url, MODEL]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for calls in (found["called"], found["streamed"]):
        (call,) = calls
        assert call["name"] == "get_weather"
        assert is_answer(call["input"])
    assert found["reason"] == "tool-calls"
    assert found["kinds"][:3] == ["start", "start-step", "tool-input-start"]
    assert "tool-call" in found["kinds"]
    assert found["ran"] == 1
    assert found["said"]
