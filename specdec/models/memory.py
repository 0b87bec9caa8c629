"""A model's size and the memory that is free, control groups included; refuses models that do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from specdec.config import WeightDtype
from specdec.control_groups import MOUNT, OWN_GROUPS, own_groups, upwards
from specdec.errors import ModelError
from specdec.models.config import ModelConfig
from specdec.models.pack import PackedCache, check_shapes, cut_output
from specdec.models.progress import Progress, silent
from specdec.models.resolve import resolve
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import VocabularyCut
from specdec.models.weights import ArraySpec, layout_bytes, plan_layout

# Files with a group's limit and use, and the fields of memory.stat for page cache, which Linux reclaims when it must
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def cgroup_free(mount: Path, own: Path) -> int | None:
    """The bytes that the tightest control group around this process leaves; None where no group has a limit.

    mount: of the control groups. own: ``/proc/self/cgroup``.
    """
    places = own_groups(own)
    roots = [(mount, places.get("", "/"), _V2), (mount / "memory", places.get("memory", "/"), _V1)]
    found = [_free(group, files) for root, place, files in roots for group in upwards(root, place)]
    return min((left for left in found if left is not None), default=None)


def _free(group: Path, files: tuple[str, str, tuple[str, str]]) -> int | None:
    limit_file, used_file, reclaimable = files
    try:
        limit = (group / limit_file).read_text().strip()
        if not limit.isdigit():
            return None
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + sum(int(stat.get(name, 0)) for name in reclaimable)


GIB = 1 << 30  # bytes
WORKING_BYTES = 256 << 20  # held while loading beside the weights: slices in conversion, tokenizer, interpreter


def available_bytes(cgroup: Path = MOUNT, own: Path = OWN_GROUPS) -> int:
    """Bytes that this process may still take: the machine's free memory, or what a limit of its control groups leaves.

    cgroup: the control groups' mount. own: the file that lists this process's groups.
    """
    free = psutil.virtual_memory().available
    left = cgroup_free(cgroup, own)
    return free if left is None else min(free, left)


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
    read_bytes: int  # of the weights that every step reads: all but the embedding, in which rows are looked up

    def step_bytes(self, rows: int) -> int:
        """Bytes of the buffers that `Decoder` and its kernels allocate for a forward of ``rows`` rows."""
        c = self.config
        widest = max(c.hidden_size, c.intermediate_size, c.q_size)
        values = 2 * c.hidden_size + 2 * c.q_size + 2 * c.kv_size + 2 * c.intermediate_size + c.vocab_size
        return rows * (4 * values + 10 * widest + 4 * c.q_size)


def measure_model(
    ref: str,
    *,
    dtype: WeightDtype,
    cache_dir: Path,
    progress: Progress | None = None,
    cut: VocabularyCut | None = None,
    like: Tokenizer | None = None,
) -> ModelSize:
    """The size of the model ``ref`` as `load_model` would load it; fetched if missing.

    Raises:
        ModelError: not found, not readable, or a tensor is missing or of another shape.
        UnsupportedModelError: the architecture or a tensor type is not supported.
    """
    cache_dir = cache_dir.expanduser()
    checkpoint = resolve(ref, cache_dir, progress or silent)
    if cut is not None:
        checkpoint = cut_output(checkpoint, cut, dtype, cache_dir, like)
    if checkpoint.keeps_packed:
        packed = PackedCache(cache_dir / "packed", checkpoint, dtype).open()
        if packed is not None:
            return _size(checkpoint.name, packed.config, packed.layout)
    source = checkpoint.open()
    check_shapes(source)
    return _size(checkpoint.name, source.config, plan_layout(source, dtype))


def _size(name: str, config: ModelConfig, layout: Sequence[ArraySpec]) -> ModelSize:
    read = sum(spec.nbytes for spec in layout if spec.name.partition(".")[0] != "embed")
    return ModelSize(name, config, layout_bytes(layout), read)
