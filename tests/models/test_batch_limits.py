"""A batch that a decoder's buffers or pool do not hold is refused, and one at the limits is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.models.decoder import check_batch
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

LIMITS: Any = SimpleNamespace(
    max_rows=3, max_logit_rows=2, max_positions=70, config=SimpleNamespace(vocab_size=9), pool=SimpleNamespace(pages=5)
)


def checked(tokens: list[int], ctx: int, pages: list[int], logit_rows: list[int]) -> None:
    entry = BatchEntry(tokens, range(-1, len(tokens) - 1), ctx, pages)
    check_batch(LIMITS, ForwardBatch.build([entry]), logit_rows)


def test_limits_are_met() -> None:
    checked([0, 8, 3], 67, [0, 4], [0, 2])


@pytest.mark.parametrize(
    ("tokens", "ctx", "pages", "logit_rows", "match"),
    [
        ([1] * 4, 0, [0], [0], "4 rows, the buffers hold 3"),
        ([1] * 3, 0, [0], [0, 1, 2], "3 rows, the buffers hold 2"),
        ([1] * 3, 0, [0], [3], r"logit_rows: must lie in \[0, 3\)"),
        ([1] * 3, 0, [0], [-1], r"logit_rows: must lie in \[0, 3\)"),
        ([1] * 3, 68, [0, 1], [0], "position 70, the limit is 69"),
        ([1, 9], 0, [0], [0], r"tokens: ids must lie in \[0, 9\)"),
        ([1, -1], 0, [0], [0], r"tokens: ids must lie in \[0, 9\)"),
        ([1], 0, [0, 5], [0], r"page_table: ids must lie in \[0, 5\)"),
        ([1], 0, [0, -1], [0], r"page_table: ids must lie in \[0, 5\)"),
    ],
)
def test_what_does_not_fit_is_named(
    tokens: list[int], ctx: int, pages: list[int], logit_rows: list[int], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        checked(tokens, ctx, pages, logit_rows)
