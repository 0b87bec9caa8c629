"""One line of the report: a kernel case compiled for a chip, and what is wrong with the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from verify_kernels.gpu.aot.job import Job
from verify_kernels.gpu.aot.usage import Usage


@dataclass(frozen=True, slots=True)
class Row:
    """``usage`` is None where there is nothing to read it from; ``problems`` is empty where all is well; ``seconds``
    are of the compilation, next to nothing where triton's cache had it."""

    job: Job
    usage: Usage | None
    problems: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Flat, for a JSON report."""
        usage = asdict(self.usage) if self.usage else {}
        return {
            "case": self.job.label,
            "module": self.job.module,
            "kernel": self.job.kernel,
            "target": self.job.target,
            **usage,
            "seconds": round(self.seconds, 3),
            "problems": list(self.problems),
        }
