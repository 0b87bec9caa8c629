"""How large a model is, found out without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec.config import WeightDtype
from specdec.models.layout import layout_bytes, plan_layout
from specdec.models.model_config import ModelConfig
from specdec.models.packed_cache import PackedCache
from specdec.models.progress import Progress, silent
from specdec.models.resolve import resolve


@dataclass(frozen=True, slots=True)
class ModelSize:
    """``weight_bytes``: of its packed weights."""

    name: str
    config: ModelConfig
    weight_bytes: int

    def step_bytes(self, rows: int) -> int:
        """Bytes of the buffers of a forward of ``rows`` rows: what `Decoder` and its kernels allocate."""
        c = self.config
        widest = max(c.hidden_size, c.intermediate_size, c.q_size)
        values = 2 * c.hidden_size + 2 * c.q_size + 2 * c.kv_size + 2 * c.intermediate_size + c.vocab_size
        return rows * (4 * values + 9 * widest + 4 * c.q_size)


def measure_model(ref: str, *, dtype: WeightDtype, cache_dir: Path, progress: Progress | None = None) -> ModelSize:
    """The size of the model that ``ref`` names, as `load_model` would load it; fetched when missing, as there.

    Raises:
        ModelError: not found, or not readable.
        UnsupportedModelError: of an architecture or tensor type that specdec does not run.
    """
    cache_dir = cache_dir.expanduser()
    checkpoint = resolve(ref, cache_dir, progress or silent)
    if checkpoint.keeps_packed:
        packed = PackedCache(cache_dir / "packed", checkpoint, dtype).open()
        if packed is not None:
            return ModelSize(checkpoint.name, packed.config, packed.nbytes)
    source = checkpoint.open()
    return ModelSize(checkpoint.name, source.config, layout_bytes(plan_layout(source, dtype)))
