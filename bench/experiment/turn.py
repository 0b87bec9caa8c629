"""Requests that both arms are asked, one arm after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.experiment.paired_ask import PairedAsk


class Turn(NamedTuple):
    """``first``: the arm (0 or 1) that is asked first."""

    first: int
    asks: Sequence[PairedAsk]
