"""What is wrong with a batch is said before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from verify_kernels.forward_batch import ForwardBatch


def check_batch(
    batch: ForwardBatch,
    logit_rows: Sequence[int],
    *,
    max_rows: int,
    max_logit_rows: int,
    max_positions: int,
    vocab_size: int,
    pages: int,
) -> None:
    """Check a batch against a decoder's limits.

    Raises:
        ValueError: more rows, logit rows or positions than the buffers hold, or a token or page id out of range.
    """
    if batch.rows > max_rows:
        raise ValueError(f"batch: {batch.rows} rows, the buffers hold {max_rows}")
    if len(logit_rows) > max_logit_rows:
        raise ValueError(f"logit_rows: {len(logit_rows)} rows, the buffers hold {max_logit_rows}")
    # An upper bound on the last position; exact for one entry, and cheaper than a gather per row.
    last = int(batch.entry_ctx.max()) + int(batch.depth.max())
    if logit_rows and not 0 <= min(logit_rows) <= max(logit_rows) < batch.rows:
        raise ValueError(f"logit_rows: must lie in [0, {batch.rows})")
    if last >= max_positions:
        last = int((batch.entry_ctx[batch.entry_of] + batch.depth).max())
    if last >= max_positions:
        raise ValueError(f"batch: position {last}, the limit is {max_positions - 1}")
    if int(batch.tokens.min()) < 0 or int(batch.tokens.max()) >= vocab_size:
        raise ValueError(f"tokens: ids must lie in [0, {vocab_size})")
    if int(batch.page_table.min()) < 0 or int(batch.page_table.max()) >= pages:
        raise ValueError(f"page_table: ids must lie in [0, {pages})")
