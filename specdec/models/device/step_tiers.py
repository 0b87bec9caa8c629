"""Which tier a step gets: few sizes, so that few graphs are captured, and little padding where it costs."""

from __future__ import annotations

from bisect import bisect_left

from specdec.models.device.step_tier import StepTier

# Below 16 rows only attention's and the samplers' grids grow with rows; above, matrix products come in tiles.
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# No grid depends on them, only what is uploaded: 2 KiB per sequence for up to 32k tokens. Each size more would have its
# graphs recorded again for every other size.
_PAGES = (512,)


class StepTiers:
    """Tiers up to ``max_entries`` sequences, ``max_rows`` rows, ``max_samples`` logit rows and ``max_pages`` pages per
    sequence, which are tiers themselves."""

    def __init__(self, max_entries: int, max_rows: int, max_samples: int, max_pages: int) -> None:
        doubling = tuple(1 << i for i in range(max_entries.bit_length()))
        self._entries = _ladder(doubling, max_entries)
        self._rows = _ladder(_ROWS, max_rows)
        self._samples = (0, *_ladder(_ROWS, max_samples))
        self._pages = _ladder(_PAGES, max_pages)

    @property
    def largest(self) -> StepTier:
        """The tier that everything fits in."""
        return StepTier(self._entries[-1], self._rows[-1], self._samples[-1], self._pages[-1])

    def of(self, entries: int, rows: int, samples: int, pages: int) -> StepTier:
        """The least tier that holds a step.

        Raises:
            ValueError: none does; names what is too many.
        """
        return StepTier(
            _least("entries", self._entries, entries),
            _least("rows", self._rows, rows),
            _least("logit_rows", self._samples, samples),
            _least("pages", self._pages, pages),
        )


def _ladder(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)


def _least(name: str, ladder: tuple[int, ...], wanted: int) -> int:
    if wanted > ladder[-1]:
        raise ValueError(f"{name}: {wanted}, the buffers hold {ladder[-1]}")
    return ladder[bisect_left(ladder, wanted)]
