"""Keeps packed weights on disk, so that a model starts at the speed of the disk the second time."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from pathlib import Path

from specdec.config import WeightDtype
from specdec.models.checkpoint import Checkpoint
from specdec.models.model_config import ModelConfig
from specdec.models.packed_file import PackedFile, PackedFileError, write_packed_file
from specdec.models.progress import Progress
from specdec.models.weights_buffer import WeightsBuffer

logger = logging.getLogger(__name__)

_FORMAT = 4  # raise when packing or its layout changes
_SPARE_BYTES = 1 << 30  # disk left free for others


class PackedCache:
    """The cached weights of one model in one dtype.

    A file's name holds a hash of the model's place and a key over its content: when the content changes the
    key does, and what was kept for that place before is deleted.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, dtype: WeightDtype) -> None:
        self._name = checkpoint.name
        self.key = hashlib.sha256(f"{checkpoint.fingerprint()}|{dtype}|{_FORMAT}".encode()).hexdigest()
        place = hashlib.sha256(str(checkpoint.path.resolve()).encode()).hexdigest()[:8]
        slug = re.sub(r"[^\w.-]", "_", checkpoint.name)[:64]
        self._folder = folder
        self._stem = f"{slug}-{dtype}-{place}"
        self.path = folder / f"{self._stem}-{self.key[:16]}.packed"

    def open(self) -> PackedFile | None:
        """The cached file with its header checked, or None when there is none; a damaged one is deleted."""
        if not self.path.exists():
            return None
        try:
            return PackedFile(self.path, self.key)
        except PackedFileError as error:
            self._discard(error)
            return None

    def read(self, file: PackedFile, progress: Progress) -> WeightsBuffer | None:
        """The weights of an opened file, or None when they turn out to be damaged; the file is deleted then."""
        done = 0

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            progress(f"loading {self._name}", done, file.nbytes)

        try:
            return file.read(on_bytes)
        except (PackedFileError, OSError) as error:
            self._discard(error)
            return None

    def write(self, config: ModelConfig, buffer: WeightsBuffer) -> None:
        """Keep the weights; a failure to do so is logged, since the model runs without it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._folder).free < buffer.nbytes + _SPARE_BYTES:
                logger.warning("%s: too little disk space to keep packed weights of %s", self._folder, self._name)
                return
            write_packed_file(self.path, self.key, config, buffer)
            for stale in self._folder.glob(f"{self._stem}-*.packed"):
                if stale != self.path:
                    stale.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: packed weights can not be cached (%s)", self._folder, error)

    def _discard(self, error: Exception) -> None:
        logger.warning("%s: cached weights are damaged (%s), packing again", self.path, error)
        self.path.unlink(missing_ok=True)
