"""Chooses the kernels of this machine: native where they build, the torch twins elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec.errors import KernelError
from verify_kernels.backend import Backend
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeBackend
from verify_kernels.cpu.sampling import NativeSampling
from verify_kernels.reference_backend import ReferenceBackend
from verify_kernels.reference_sampling import ReferenceSampling
from verify_kernels.sampling_kernels import SamplingKernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's kernels. ``backend`` makes a fresh one (with its own scratch) for each decoder."""

    name: str
    backend: Callable[[], Backend]
    sampling: SamplingKernels


def load_kernels(choice: Literal["auto", "native", "reference"], cache_dir: Path, threads: int) -> Kernels:
    """Kernels by name; "auto" prefers native ones and says so when they can not be had.

    Raises:
        KernelError: "native" was asked for and can not be built or loaded.
    """
    if choice != "reference":
        try:
            return Kernels("native", lambda: NativeBackend(cache_dir, threads), NativeSampling(load_library(cache_dir)))
        except KernelError as error:
            if choice == "native":
                raise
            logger.warning("native kernels are not available, falling back to slow reference ones: %s", error)
    return Kernels("reference", lambda: ReferenceBackend(threads), ReferenceSampling())
