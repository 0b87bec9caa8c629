"""Prints the size of the code and its import cycles: ``make structure``. The exit code is 1 if a figure exceeds its
ceiling."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import grimp

from tools.markdown import REPOSITORY

PACKAGES = ("specdec", "draft", "verify_kernels", "server", "bench", "cluster")
SOURCES = (".py", ".cpp", ".h", ".proto", ".ts", ".tsx", ".lua", ".css")
ELSEWHERE = ("tests/", "docs/", "examples/", "server/playground/static/")
CEILINGS = {
    "modules": 328,
    "lines": 78_274,
    "largest": 700,
    "cycle": 0,
}
"""Largest value allowed for each figure. Lower one when the code shrinks; raise one only with a reason."""


def product_files() -> dict[str, int]:
    """Path -> lines of every written source file, without tests, documents, examples and generated files."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = [n for n in listed.splitlines() if n.endswith(SOURCES) and "_pb2" not in n and not n.startswith(ELSEWHERE)]
    names = [n for n in names if "/test/" not in n]  # the tests of the page and of the extension
    paths = {name: REPOSITORY / name for name in names}
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items() if path.exists()}


def module_cycle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """The modules of a cycle of imports, from module -> imported modules; empty if there is none. Lazy and type-only
    imports count."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, with ``--list`` the files behind them; returns 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the files behind the figures")
    options = parser.parse_args(arguments)
    exceeded = []

    def report(key: str, name: str, found: list[str], number: int | None = None) -> None:
        value, ceiling = len(found) if number is None else number, CEILINGS[key]
        print(f"{value:7,}  {f'<= {ceiling:,}':>9}  {name}")
        if value > ceiling:
            exceeded.append(f"{name}: {value:,}, at most {ceiling:,} allowed")
        if options.list:
            print("".join(f"{'':22}{line}\n" for line in found), end="")

    lines, graph = product_files(), grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = sorted(name for name in lines if name.endswith(".py") and not name.endswith("__init__.py"))
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    kinds = Counter[str]()
    for name, count in lines.items():
        kinds[name.rsplit(".", 1)[1]] += count
    largest = sorted((f"{lines[name]:5} {name}" for name in modules), reverse=True)[:20]
    report("modules", "product modules: written .py files, without __init__, tests, docs, examples", modules)
    by_kind = [f"{count:6} .{kind}" for kind, count in kinds.most_common()]
    report("lines", f"product lines, blank ones too ({' '.join(SOURCES)})", by_kind, sum(lines.values()))
    report("largest", "lines of the largest module", largest, int(largest[0].split()[0]))
    report("cycle", "modules that import each other in a circle", module_cycle(imports))
    for line in exceeded:
        print(line, file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
