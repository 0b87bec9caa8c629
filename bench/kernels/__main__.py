"""Entry point of ``python -m bench.kernels``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.kernels.kernel_bench import KernelBench


def main() -> int:
    """Measure, print each figure as it comes, write the report. Returns the exit code: 1 where something could not be
    measured because it failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the report goes")
    parser.add_argument("--seconds", type=float, default=240.0, help="after which no measurement begins (default: 240)")
    parser.add_argument("--target", default="random:llama-3.1-8b", help="whose step is measured")
    parser.add_argument("--commit", default="", help="what is measured, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU; there is nothing to measure", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(line, flush=True)
        save()  # what was measured is kept, whatever happens next

    def save() -> None:
        options.json.write_text(json.dumps(bench.report, indent=1) + "\n", encoding="utf-8")

    bench = KernelBench(torch.device("cuda", 0), options.target, options.seconds, say, options.commit)
    bench.run()
    save()
    for line in bench.report["aims"]:
        print(f"{line['measure']}: {line['figure']} (aim {line['aim']}), {line['note']}", flush=True)
    return 1 if bench.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
