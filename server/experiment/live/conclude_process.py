"""Analyses an experiment's folder in a process of its own: ``python -m server.experiment.live.conclude_process FOLDER``
prints a `Conclusion` as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from server.experiment.analysis.analyse import analyse
from server.experiment.config import Manifest
from server.experiment.live.folder import NOTHING_YET, Conclusion
from server.experiment.records import ExperimentError, read_records
from server.experiment.report.render import render

_NICE = 10


def main(folder: Path) -> int:
    """The exit code; `NOTHING_YET`: there is no result, and standard error says why."""
    os.nice(_NICE)  # those who are served come first
    try:
        result = analyse(Manifest.read(folder), read_records(folder))
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return NOTHING_YET
    sys.stdout.write(Conclusion(result=result.model_dump_json(), report=render(result)).model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
