"""/v1/predict_edit: its body, its whole answer, its stream."""

from __future__ import annotations

from typing import Any

from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.http.harness import events, running

PATH = "/v1/predict_edit"
DIFF = "@@ -1 +1 @@\n-def mean(numbers):\n+def mean(values):\n"
BODY: dict[str, Any] = {
    "path": "book.py", "text": BOOK, "cursor": BOOK.index("if not"), "unit": "utf16",
    "recent": [{"path": "book.py", "diff": DIFF}], "extra": [{"filename": "a.py", "text": "x = 1\n"}],
    "diagnostics": [{"line": 8, "message": "unknown name"}],
}  # fmt: skip
WANTED = BOOK.replace("values", "numbers").replace("mean(numbers)", "mean(values)")


def applied(edits: list[dict[str, Any]]) -> str:
    text = BOOK
    for edit in reversed(edits):
        text = text[: edit["start"]] + edit["text"] + text[edit["end"] :]
    return text


def test_edits_complete_and_streamed() -> None:
    with running(CodeTokenizer, factory=BOOKS) as server:  # type: ignore[arg-type]
        whole = server.client.post(PATH, json=BODY).json()
        assert (whole["object"], whole["finish_reason"]) == ("edit_prediction", "stop")
        assert applied(whole["edits"]) == WANTED
        assert whole["usage"]["completion_tokens_details"]["prediction_form"] == "sweep"
        *parts, end, done = events(server.client.post(PATH, json={**BODY, "stream": True}).content)
        assert done == "[DONE]"
        assert len(parts) > 1
        assert [edit for part in parts for edit in part["edits"]] == whole["edits"]
        assert (end["edits"], end["finish_reason"]) == ([], "stop")
        status, error = server.refused(PATH, text=BOOK, cursor=-1, unit="miles", recent=[{"before": 3}])
        assert status == 400
        assert {each["param"] for each in error["errors"]} == {"cursor", "unit", "recent[0].before"}
        assert server.refused(PATH)[1]["errors"][0]["param"] == "text"
