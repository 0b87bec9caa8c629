"""How many samples of each prompt are wanted."""

from __future__ import annotations

from server.http.body import Body
from specdec.engine.validation import MAX_N


def read_n(body: Body) -> int:
    """``n``; ``best_of`` may only say the same, since every sample that is made is returned."""
    n = body.integer("n", 1, MAX_N) or 1
    best_of = body.integer("best_of", 1, MAX_N)
    if best_of not in (None, n):
        body.refuse("best_of", f"must equal n ({n}): every sample is returned; ask for more with n and choose yourself")
    return n
