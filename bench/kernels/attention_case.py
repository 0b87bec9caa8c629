"""One shape of attention to be timed."""

from __future__ import annotations

from dataclasses import dataclass

TILE = 64


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``batch`` sequences of ``context`` filled slots, each with a tree of ``nodes`` nodes; bf16."""

    batch: int
    context: int
    nodes: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int = 0

    @property
    def name(self) -> str:
        """As the report calls it."""
        window = f" window {self.window}" if self.window else ""
        return f"b{self.batch} ctx{self.context} nodes{self.nodes} kv{self.kv_heads}x{self.head_dim}{window}"

    @property
    def least_bytes(self) -> int:
        """Bytes that must move: every key and value once, queries in, results out."""
        keys = min(self.context, self.window) if self.window else self.context
        kv = 2 * self.batch * self.kv_heads * (keys + self.nodes) * self.head_dim * 2
        return kv + 2 * self.batch * self.nodes * self.heads * self.head_dim * 2


CASES = (
    *(AttentionCase(1, context, nodes) for context in (4096, 32768) for nodes in (1, 16, 64)),
    *(AttentionCase(8, context, nodes) for context in (4096, 16384) for nodes in (1, 16)),
    *(AttentionCase(32, 4096, nodes) for nodes in (1, 16)),
    AttentionCase(8, 4096, 16, heads=28, kv_heads=4),
    AttentionCase(8, 8192, 16, heads=16, kv_heads=8, head_dim=256),
    AttentionCase(8, 16384, 16, window=4096),
)
# Those that others' kernels are compared on
COMPARED = (*(AttentionCase(batch, 4096, 16) for batch in (1, 2, 4, 8)), AttentionCase(1, 32768, 16))
