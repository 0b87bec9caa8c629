"""Entry point of ``python -m bench.kernels``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from bench.kernels.kernel_bench import PARTS, KernelBench


def main() -> int:
    """Measure, print each figure, write the report. Returns the exit code: 1 if a measurement failed, 2 without a
    GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    parser.add_argument("--target", default="random:llama-3.1-8b", help="model whose steps are measured")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU", file=sys.stderr)
        return 2

    def say(line: str) -> None:
        print(line, flush=True)
        save()  # keeps the figures if a later bench fails

    def save() -> None:
        if options.json:
            options.json.write_text(json.dumps(bench.report, indent=1) + "\n", encoding="utf-8")

    bench = KernelBench(torch.device("cuda", 0), options.target, say)
    bench.run(options.only)
    save()
    for line in bench.report["aims"]:
        print(f"{line['measure']}: {line['figure']} (aim {line['aim']}), {line['note']}", flush=True)
    return 1 if bench.report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
