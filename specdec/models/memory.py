"""A model's size; refuses models that do not fit into the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.config import WeightDtype
from specdec.control_groups import available_bytes
from specdec.errors import ModelError
from specdec.models.config import ModelConfig
from specdec.models.pack import PackedCache, check_shapes, cut_output
from specdec.models.progress import Progress, silent
from specdec.models.resolve import resolve
from specdec.models.vocabulary_cut import VocabularyCut
from specdec.models.weights import ArraySpec, layout_bytes, plan_layout

GIB = 1 << 30  # bytes
WORKING_BYTES = 256 << 20  # held while loading beside the weights: slices in conversion, tokenizer, interpreter


def check_memory(name: str, nbytes: int, dtype: WeightDtype | None, available: int | None = None) -> None:
    """ModelError unless ``nbytes`` and `WORKING_BYTES` fit in ``available`` (default: measured).

    dtype: of the weights that ``name`` has; None: it is a KV cache.
    """
    available = available_bytes() if available is None else available
    needed = nbytes + WORKING_BYTES
    if needed > available:
        ways = "use dtype int8 or a smaller model" if dtype in ("bf16", "fp32") else "use a smaller model"
        ways = "lower engine.kv_tokens" if dtype is None else ways
        what = "it needs" if dtype is None else f"{dtype} weights need"
        raise ModelError(
            f"{name}: too little memory: {what} {needed / GIB:.1f} GiB, "
            f"{max(available, 0) / GIB:.1f} GiB are available; {ways}, or free some memory"
        )


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's memory on the CPU."""

    name: str
    config: ModelConfig
    weight_bytes: int  # of the packed weights
    read_bytes: int  # of the weights that a row reads: all but the embedding and the experts that it does not choose

    def step_bytes(self, rows: int) -> int:
        """Bytes of the buffers that `Decoder` and its kernels allocate for a forward of ``rows`` rows."""
        c = self.config
        widest = max(c.hidden_size, c.intermediate_size, c.q_size)
        values = 2 * c.hidden_size + 2 * c.q_size + 2 * c.kv_size + c.vocab_size + c.experts
        mlps = c.mlps_per_token * (8 * c.intermediate_size + 10 * widest) + 4 * c.experts_per_token * c.hidden_size
        return rows * (4 * values + mlps + 4 * c.q_size)


def measure_model(
    ref: str,
    *,
    dtype: WeightDtype,
    cache_dir: Path,
    progress: Progress | None = None,
    cut: VocabularyCut | None = None,
) -> ModelSize:
    """The size of the model ``ref`` as `load_model` would load it; fetched if missing.

    Raises:
        ModelError: not found, not readable, or a tensor is missing or of another shape.
        UnsupportedModelError: the architecture or a tensor type is not supported.
    """
    checkpoint = resolve(ref, cache_dir, progress or silent)
    if cut is not None:
        checkpoint = cut_output(checkpoint, cut, dtype, cache_dir)
    packed = PackedCache(cache_dir / "packed", checkpoint, dtype).open()
    if packed is not None:
        return _size(checkpoint.name, packed.config, packed.layout)
    source = checkpoint.open()
    check_shapes(source)
    return _size(checkpoint.name, source.config, plan_layout(source, dtype))


def _size(name: str, config: ModelConfig, layout: Sequence[ArraySpec]) -> ModelSize:
    read = sum(
        spec.nbytes * (config.mlp_share if spec.name.partition("/")[0].endswith((".gate_up", ".down")) else 1)
        for spec in layout
        if spec.name.partition(".")[0] != "embed"
    )
    return ModelSize(name, config, layout_bytes(layout), round(read))
