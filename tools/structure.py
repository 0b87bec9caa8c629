"""Prints how large the code is and how many files a reader opens for one step or one call: ``make structure``.

The files of a step and of a call are traced: a file counts when one of its functions runs. Needs SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import grpc

from server.serving import Addresses, Serving
from specdec.api.v1 import generation_pb2, generation_pb2_grpc
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from specdec.core.types import Request, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.build import build_engine
from specdec.models.resolve import load_tokenizer
from tools.markdown import REPOSITORY

PACKAGES = ("specdec", "draft", "verify_kernels", "server", "bench", "cluster")
SOURCES = (".py", ".cpp", ".h", ".proto", ".ts", ".tsx", ".lua", ".css", ".mjs")
ELSEWHERE = ("tests/", "docs/", "examples/", "server/page/static/")
MODEL = "smollm2-135m"
PROMPT = "Once upon a time there was a small engine"
SMALL = 60  # lines below which a module with one importer is named


def product_files() -> dict[str, int]:
    """Lines by path, relative to the repository: sources that people write, without tests, documents and examples."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = [n for n in listed.splitlines() if n.endswith(SOURCES) and "_pb2" not in n and not n.startswith(ELSEWHERE)]
    paths = {name: REPOSITORY / name for name in names}
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items() if path.exists()}


def is_module(name: str) -> bool:
    """Whether a source file is a Python module, and no package's ``__init__``."""
    return name.endswith(".py") and not name.endswith("__init__.py")


def small_modules(graph: Any, lines: dict[str, int]) -> list[str]:
    """Modules of fewer than `SMALL` lines that exactly one other imports."""
    found = []
    for name in sorted(filter(is_module, lines)):
        module = name.removesuffix(".py").replace("/", ".")
        small = lines[name] < SMALL and module in graph.modules
        if small and len(graph.find_modules_that_directly_import(module)) == 1:
            found.append(f"{lines[name]:5} {name}")
    return found


def server_cycles(graph: Any) -> list[str]:
    """Groups of units of `server` that import each other; a unit is a module or a package directly inside it.

    Imports for type checkers count."""

    def unit(module: str) -> str:
        return module.split(".")[1]

    inside = [module for module in graph.modules if module.startswith("server.")]
    above: dict[str, set[str]] = {unit(module): set() for module in inside}
    for module in inside:
        for other in graph.find_modules_directly_imported_by(module):
            if other.startswith("server."):
                above[unit(module)].add(unit(other))
    for middle, further in above.items():
        for reached in above.values():
            if middle in reached:
                reached |= further
    groups = {frozenset(b for b in above if a in above[b] and b in above[a]) for a in above}
    return sorted(" <-> ".join(sorted(group)) for group in groups if len(group) > 1)


class FilesTrace:
    """The project's files of which a function ran while it was recording, in any thread."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self._seen is not None and event == "call":
            self._seen.add(frame.f_code.co_filename)

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Fills the list when it ends."""
        self._seen, found = set(), []
        yield found
        seen, self._seen = self._seen, None
        names = [str(Path(path).relative_to(REPOSITORY)) for path in seen if Path(path).is_relative_to(REPOSITORY)]
        found += sorted(name for name in names if name.startswith(PACKAGES) and "_pb2" not in name)


def step_files(trace: FilesTrace) -> list[str]:
    """One step of plain decode on the CPU, of one sequence among no others."""
    engine = build_engine(EngineConfig(target=MODEL, device="cpu", speculation=SpeculationConfig(profile_s=0)))
    ids = tuple(load_tokenizer(MODEL, EngineConfig().cache_dir).encode(PROMPT))
    plain = SpeculationParams(mode=SpeculationMode.OFF)
    engine.submit(Request("r", ids, stopping=StoppingParams(max_tokens=16, ignore_eos=True), speculation=plain))
    for _ in range(4):
        engine.step()
    with trace.recording() as found:
        events = engine.step()
    if not events:
        raise RuntimeError("the step gave no token")
    return found


def http_call(address: Addresses) -> None:
    """A streamed completion over a connection of its own."""
    connection = http.client.HTTPConnection(address.host, address.http_port)
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    if b"[DONE]" not in answer:
        raise RuntimeError(f"POST /v1/completions: {answer[:200]!r}")


def grpc_call(address: Addresses) -> None:
    """A streamed generation over a channel of its own."""
    request = generation_pb2.GenerateStreamRequest(text=PROMPT)
    request.stopping.max_tokens = 8
    with grpc.insecure_channel(f"{address.host}:{address.grpc_port}") as channel:
        messages = list(generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request))
    if len(messages) < 3:
        raise RuntimeError(f"GenerateStream answered {len(messages)} messages")


async def call_files(trace: FilesTrace, calls: list[Callable[[Addresses], None]]) -> list[list[str]]:
    """The front end's files of each call, from the socket and back to it; every call is made once before."""
    engine = EngineConfig(target=MODEL, device="cpu", speculation=SpeculationConfig(profile_s=0))
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0))
    serving = Serving(config, lambda _: load_tokenizer(MODEL, engine.cache_dir))
    address = await serving.start()
    files = []
    try:
        await serving.wait_ready()
        for call in calls:
            await asyncio.to_thread(call, address)
            with trace.recording() as found:
                await asyncio.to_thread(call, address)
            files.append(found)
    finally:
        await serving.stop()
    return files


def main() -> None:
    """Print the figures, with ``--list`` what is behind them."""
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files behind the figures")
    parser.add_argument("--static", action="store_true", help="run nothing: only what can be counted")
    options = parser.parse_args()

    def tell(name: str, limit: str, found: list[str], number: int | None = None) -> None:
        print(f"{len(found) if number is None else number:7,}  {limit:>8}  {name}")
        if options.list:
            print("".join(f"{'':22}{line}\n" for line in found), end="")

    lines, graph = product_files(), grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = sorted(filter(is_module, lines))
    kinds = Counter[str]()
    for name, count in lines.items():
        kinds[name.rsplit(".", 1)[1]] += count
    largest = sorted((f"{lines[name]:5} {name}" for name in modules), reverse=True)[:20]
    tell("product modules: tracked .py, no __init__, nothing generated, no tests, docs, examples", "<= 330", modules)
    told = [f"{count:6} .{kind}" for kind, count in kinds.most_common()]
    tell(f"product lines, blank ones too ({' '.join(SOURCES)}, same folders)", "<= 62,000", told, sum(lines.values()))
    tell("lines of the largest module", "<= 700", largest, int(largest[0].split()[0]))
    tell(f"modules under {SMALL} lines that exactly one other imports", "", small_modules(graph, lines))
    tell("import cycles between units of server", "0", server_cycles(graph))
    if options.static:
        return
    trace = FilesTrace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    tell("files that one CPU step of plain decode runs through", "<= 15", step_files(trace))
    http_files, grpc_files = asyncio.run(call_files(trace, [http_call, grpc_call]))
    tell("files of the front end in a streamed POST /v1/completions", "<= 40", http_files)
    tell("files of the front end in a gRPC GenerateStream", "<= 35", grpc_files)


if __name__ == "__main__":
    main()
