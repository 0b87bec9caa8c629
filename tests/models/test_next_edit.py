"""Next-edit prompts: which are recognised, and which text is taken for the window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.core.types import Request, SpeculationMode, SpeculationParams
from specdec.models.next_edit import ANSWER_CHARACTERS, CUE_TOKENS, WindowReader, expected_answer
from tests.server.fake_tokenizer import FakeTokenizer

WINDOW = "def area(w, h):\n    return w * h\n"
ZETA = """### Instruction:
Rewrite the excerpt.

### User Edits:

User edited "a.py":
```diff
-def f(w, h):
+def area(w, h):
```

### User Excerpt:

```a.py
import math
<|editable_region_start|>
def area(w, <|user_cursor_is_here|>h):
    return w * h
<|editable_region_end|>
print(f(1, 2))
```

### Response:
"""
INSTINCT = ZETA.replace("### User Edits:", "### Context:\n<|context_file|>\n\n### User Edits:")
SWEEP = (
    "<|file_sep|>a.py.diff\noriginal:\ndef f\nupdated:\ndef area\n<|file_sep|>original/a.py\ndef f(w, h):\n"
    f"<|file_sep|>current/a.py\n{WINDOW}\n<|file_sep|>updated/a.py\n"
)
ZETA_2 = (
    "<[fim-suffix]>print(f(1, 2))\n<[fim-prefix]><filename>edit_history\n--- a/a.py\n+++ b/a.py\n-def f\n+def area\n\n"
    "<filename>a.py\nimport math\n<<<<<<< CURRENT\ndef area(w, h<|user_cursor|>):\n    return w * h\n=======\n"
    "<[fim-middle]>"
)
ZETA_2_1 = (
    "<[fim-suffix]>\nprint(f(1, 2))\n<[fim-prefix]><filename>a.py\nimport math\n<|marker_1|>def area(w, h):\n"
    "<|marker_2|>    return<|user_cursor|> w * h\n<|marker_3|>\n<[fim-middle]>"
)
QWEN = (
    "<|file_sep|>edit history\n--- a/a.py\n+++ b/a.py\n-def f\n+def area\n"
    "<|file_sep|>a.py\n<|fim_prefix|>\nimport math\n"
    "<|fim_middle|>current\ndef area(w, h):<|user_cursor|>\n    return w * h\n<|fim_suffix|>\nprint(f(1, 2))\n"
    "<|fim_middle|>updated\n"
)
QWEN_SUFFIX_FIRST = (
    "<|file_sep|>a.py\n<|fim_prefix|>\nimport math\n<|fim_suffix|>\nprint(f(1, 2))\n"
    "<|fim_middle|>current\ndef area(w, h):<|user_cursor|>\n    return w * h\n<|fim_middle|>updated\n"
)
REGION = f"<|editable_region_start|>\n{WINDOW}<|editable_region_end|>"
MARKED = "<|marker_1|>def area(w, h):\n<|marker_2|>    return w * h\n<|marker_3|>"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (SWEEP, WINDOW),
        (SWEEP.removesuffix("\n"), "\n" + WINDOW),
        (SWEEP.replace("/a.py", "/a.py:1:2").replace("w *", "w <|cursor|>*"), WINDOW),
        (SWEEP + "def area(w, h):\n", "    return w * h\n"),
        (ZETA, REGION),
        (ZETA + "\n", REGION),
        (INSTINCT, WINDOW),
        (f"<|im_start|>user\n{INSTINCT}<|im_end|>\n<|im_start|>assistant\n", WINDOW),
        (ZETA_2, WINDOW + ">>>>>>> UPDATED\n"),
        (ZETA_2_1, MARKED),
        (QWEN, WINDOW),
        (QWEN_SUFFIX_FIRST, WINDOW),
    ],
)
def test_the_window_of_each_format_is_the_prediction(prompt: str, answer: str) -> None:
    assert expected_answer(prompt) == answer
    assert expected_answer("def main():\n" * 1000 + prompt) == answer


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        WINDOW,
        "### Instruction:\nName three colours.\n\n### Response:\n",
        "<|file_sep|>a.py\n<|fim_prefix|>import math\n<|fim_suffix|>print(f(1, 2))\n<|fim_middle|>",
        "<[fim-suffix]>\nprint(f(1, 2))\n<[fim-prefix]><filename>a.py\nimport math\n<[fim-middle]>",
        SWEEP.replace("updated/a.py", "updated/b.py"),  # another file
        SWEEP.replace("current/", "before/"),
        SWEEP + "def volume(w, h, d):\n",  # the answer that has begun is no beginning of the window
        SWEEP + WINDOW,  # nothing is left to write
        SWEEP.replace(WINDOW, "\n"),
        ZETA.replace("### Response:", "### Request:"),
        ZETA.replace("<|editable_region_end|>", ""),
        ZETA + REGION + "\nNow say in words what you have changed, and why it was needed at all.\n",
        ZETA_2.removesuffix("<[fim-middle]>"),
        ZETA_2.replace("<<<<<<< CURRENT\n", ""),
        ZETA_2_1.replace("<|marker_1|>", ""),
        QWEN.replace("<|fim_middle|>current", "<|fim_middle|>"),
        QWEN + "and so on",
    ],
)
def test_any_other_prompt_has_no_prediction(prompt: str) -> None:
    assert expected_answer(prompt) == ""


def request(text: str) -> Request:
    return Request("r", tuple(FakeTokenizer().encode(text)))


class CountingTokenizer(FakeTokenizer):
    """Counts the tokens that were decoded."""

    decoded = 0

    def decode(self, ids, *, skip_special=True):  # type: ignore[no-untyped-def]
        self.decoded += len(ids)
        return super().decode(ids, skip_special=skip_special)


def test_a_request_without_a_prediction_gets_the_window() -> None:
    predicted = WindowReader(FakeTokenizer()).predict(request(SWEEP))
    assert bytes(predicted.prediction_ids).decode() == WINDOW
    assert replace(predicted, prediction_ids=()) == request(SWEEP)


@pytest.mark.parametrize(
    "untouched",
    [
        replace(request(SWEEP), prediction_ids=(1, 2)),
        replace(request(SWEEP), speculation=SpeculationParams(SpeculationMode.OFF)),
        request(WINDOW),
        request(SWEEP.replace(WINDOW, "x" * ANSWER_CHARACTERS)),
    ],
)
def test_other_requests_are_unchanged(untouched: Request) -> None:
    assert WindowReader(FakeTokenizer()).predict(untouched) is untouched


def test_a_long_ordinary_prompt_is_not_parsed() -> None:
    tokenizer = CountingTokenizer()
    WindowReader(tokenizer).predict(request(SWEEP + WINDOW * 10_000))
    assert tokenizer.decoded == CUE_TOKENS
