"""Per drafter: accepted tokens per step, and the cost of its levels and its prefill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from specdec.control.estimates.costs import CostTable
from specdec.control.inputs import DraftRecord, Ratio, SequenceInputs
from specdec.control.params import DEFAULT_PARAMS, ControlParams


class DrafterYield:
    """Accepted tokens, levels and verified rows per step, by sequence and by temperature.

    prior: tokens, levels and rows of a step without observations. pools: records of an earlier run by temperature.
    """

    def __init__(
        self,
        name: str,
        prior: tuple[float, float, float],
        pools: Mapping[int, DraftRecord] = MappingProxyType({}),
        params: ControlParams = DEFAULT_PARAMS,
    ) -> None:
        self.name, self.prior, self.params = name, prior, params
        self.pools = {
            bucket: self._with_prior(pool, params.restart_prior_steps) for bucket, pool in pools.items()
        }  # records of all sequences by temperature

    def pool(self, bucket: int) -> DraftRecord:
        """Records of all sequences of a temperature; the prior without observations."""
        found = self.pools.get(bucket)
        return self._with_prior(DraftRecord(), self.params.prior_steps) if found is None else found

    def observe(self, one: SequenceInputs, tokens: float, levels: float, rows: float) -> None:
        """Record a step in which the drafter's tree brought ``tokens``, took ``levels`` and had ``rows`` verified."""
        record = one.history.records.setdefault(self.name, DraftRecord())
        pool = self.pools.setdefault(one.history.bucket, self.pool(one.history.bucket))
        record.add(self.params.sequence_retention, tokens, levels, rows)
        pool.add(self.params.pool_retention, tokens, levels, rows)
        record.idle = pool.idle = 0

    def end_step(self, sequences: Sequence[SequenceInputs], proposed: Sequence[bool], steps: int = 1) -> None:
        """Count ``steps`` steps as idle for sequences and temperatures without a proposal."""
        buckets = {one.history.bucket for one in sequences}
        for one, did in zip(sequences, proposed, strict=True):
            if did:
                buckets.discard(one.history.bucket)
                continue
            record = one.history.records.get(self.name)
            if record is not None:
                record.idle += steps
        for bucket in buckets:
            if bucket in self.pools:
                self.pools[bucket].idle += steps

    def _with_prior(self, record: DraftRecord, steps: float) -> DraftRecord:
        """``record`` and ``steps`` steps of the prior."""
        tokens, levels, rows = self.prior
        return DraftRecord(
            record.steps + steps,
            record.tokens + steps * tokens,
            record.levels + steps * levels,
            record.rows + steps * rows,
        )


class DraftCosts:
    """Milliseconds that a model-based drafter takes.

    level: measured cost of a forward by its rows; a level has one per sequence. agreement: see `Learned.agreement`;
    None: not observed. tree_rows: of a drafter that grows a tree in one forward, the rows in it of a sequence with one
    new token.
    """

    def __init__(
        self,
        level: CostTable,
        agreement: float | None = None,
        params: ControlParams = DEFAULT_PARAMS,
        tree_rows: int = 0,
    ) -> None:
        self.level, self._params, self.tree_rows = level, params, tree_rows
        self._new_tokens = 1.0  # mean tokens without KV of a sequence at an ordinary proposal
        # Time of a proposal over that of its levels and long prefills: sampling, merging, short prefills.
        self._overhead = Ratio(params.overhead_prior_ms, params.overhead_bounds, params.ratio_retention)
        # Time of long prefills over that of as many rows of levels.
        self._prefill_ratio = Ratio(params.prefill_prior_ms, params.prefill_ratio_bounds, params.ratio_retention)
        self.agreement = params.first_agreement if agreement is None else agreement

    def forward_ms(self, batch: int) -> float:
        """Milliseconds of a forward that grows the trees of ``batch`` sequences by a level, or completes them."""
        return self.level.ms(self._rows(batch, batch * self._new_tokens))

    def _rows(self, batch: int, new_tokens: float) -> int:
        """Rows of that forward. new_tokens: of all sequences together."""
        return batch * (self.tree_rows - 1) + max(batch, round(new_tokens)) if self.tree_rows else batch

    def levels(self, most: int) -> list[float]:
        """Milliseconds of a level by sequences, from 0 to ``most``."""
        if not self.level.known:
            return [0.0] * (most + 1)  # a proposal is the way to measure it
        times, rows = self._overhead.value, self._rows(1, self._new_tokens)
        found = [times * ms for ms in self.level.span(rows, rows * (most - 1))[::rows]]
        return [0.0, *found, *(found[-1:] * (most - len(found)))]  # constant beyond the measured batch

    def prefill_ms(self, pending: int) -> float:
        """Milliseconds that ``pending`` tokens of prefill add to an ordinary first level."""
        params = self._params
        if pending <= params.short_prefill or not self.level.known:
            return 0.0
        chunk = params.prefill_chunk
        rows_ms = self.level.ms(min(pending, chunk)) * max(1.0, pending / chunk) - self.level.ms(1)
        return rows_ms * self._prefill_ratio.value

    def rows_within(self, ms: float) -> int:
        """Tokens that a draft forward of ``ms`` milliseconds computes; at least a few, so that prefill advances."""
        params = self._params
        if not self.level.known:
            return params.prefill_chunk
        return max(params.short_prefill, bisect_right(self.level.span(1, params.prefill_chunk - 1), ms))

    def observe(self, batch: int, levels: int, prefilled: int, ms: float, with_overhead_ms: float) -> bool:
        """Update from a proposal for ``batch`` sequences; returns whether it measured the price of a level.

        It computed ``prefilled`` tokens and grew ``levels`` levels in ``ms``; the propose stage took
        ``with_overhead_ms``.
        """
        params = self._params
        ordinary = prefilled <= params.short_prefill * batch
        rows = self._rows(batch, prefilled if ordinary else 0)
        if self.level.known:
            expected = levels * self.level.ms(rows) if levels else self.level.ms(1)
            prefill_ms = 0.0 if self.tree_rows and ordinary else self.prefill_ms(prefilled)
            self._overhead.add(expected + prefill_ms, with_overhead_ms)
            if prefill_ms:
                self._prefill_ratio.add(prefill_ms / self._prefill_ratio.value, max(0.0, ms - expected))
        # A proposal with a long prefill does not measure the price of a level.
        if levels and ordinary:
            self.level.observe(rows, 0, ms / levels)
            self._new_tokens += params.average_weight * (max(1.0, prefilled / batch) - self._new_tokens)
        return bool(levels and ordinary)

    def observe_agreement(self, held: int, levels: int) -> None:
        """Record that a tree held the target's choice in ``held`` of ``levels`` levels."""
        tried = min(held + 1, levels)  # levels whose parent was reached
        self.agreement += self._params.agreement_weight * (held - self.agreement * tried)
