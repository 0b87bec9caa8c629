"""The last object of an answer: why it ended, and figures that clients divide by."""

from __future__ import annotations

import json

import pytest

from server.http.ollama import OllamaAnswer, response
from server.http.tool_use import AnswerForm
from specdec.core.types import Finished, FinishReason, Request, SpeculationStats, Timings, Usage
from tests.server.http.calls import make_call


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (FinishReason.EOS, "stop"), (FinishReason.STOP_STRING, "stop"), (FinishReason.STOP_TOKEN, "stop"),
        (FinishReason.LENGTH, "length"), (FinishReason.ABORTED, "abort"),
    ],
)  # fmt: skip
def test_done_reasons_and_no_duration_is_0(reason: FinishReason, expected: str) -> None:
    end = Finished("r", 0, reason, None, Usage(), SpeculationStats(), Timings())
    form = OllamaAnswer(make_call(b"{}"), "m", [Request("r", (1,))], AnswerForm(), response, stream=True)
    found = json.loads(form.take(end))
    assert (found["model"], found["response"], found["done"], found["done_reason"]) == ("m", "", True, expected)
    assert all(found[name] == 1 for name in found if name.endswith("_duration"))
    assert (found["prompt_eval_count"], found["eval_count"]) == (0, 0)
