"""Prints the size of the code and the number of files behind one step or one call: ``make structure``.

Files are traced: a file counts if one of its functions runs. Tracing needs SmolLM2-135M. The exit code is 1 if a figure
exceeds its ceiling.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
SOURCES = (".py", ".cpp", ".h", ".proto", ".ts", ".tsx", ".lua", ".css")
ELSEWHERE = ("tests/", "docs/", "examples/", "server/playground/static/")
MODEL = "smollm2-135m"
PROMPT = "Once upon a time there was a small engine"
CEILINGS = {
    "modules": 331,
    "lines": 81_100,
    "largest": 700,
    "cycles": 0,
    "step": 20,
    "http": 32,
    "grpc": 28,
}
"""Largest value allowed for each figure. Lower one when the code shrinks; raise one only with a reason."""


def product_files() -> dict[str, int]:
    """Path -> lines of every written source file, without tests, documents, examples and generated files."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    names = [n for n in listed.splitlines() if n.endswith(SOURCES) and "_pb2" not in n and not n.startswith(ELSEWHERE)]
    names = [n for n in names if "/test/" not in n]  # the tests of the page and of the extension
    paths = {name: REPOSITORY / name for name in names}
    return {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in paths.items() if path.exists()}


def is_module(name: str) -> bool:
    """Whether a source file is a Python module other than ``__init__``."""
    return name.endswith(".py") and not name.endswith("__init__.py")


def module_cycles(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Groups of modules that import each other, from module -> imported modules. Lazy and type-only imports count."""
    above = {module: set(imported) for module, imported in imports.items()}
    for middle, further in above.items():
        for reached in above.values():
            if middle in reached:
                reached |= further
    groups = {frozenset(b for b in above if a in above[b] and b in above[a]) for a in above}
    return sorted(" <-> ".join(sorted(group)) for group in groups if len(group) > 1)


def product_imports(graph: Any) -> dict[str, set[str]]:
    """Module -> modules of the product that it imports. Packages count as their ``__init__``."""
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


class FilesTrace:
    """Records the product's files of which a function runs, in any thread."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self._seen is not None and event == "call":
            self._seen.add(frame.f_code.co_filename)

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Record during the block; the list is filled at its end."""
        self._seen, found = set(), []
        yield found
        seen, self._seen = self._seen, None
        names = [str(Path(path).relative_to(REPOSITORY)) for path in seen if Path(path).is_relative_to(REPOSITORY)]
        found += sorted(name for name in names if name.startswith(PACKAGES) and "_pb2" not in name)


def step_files(trace: FilesTrace) -> list[str]:
    """Files of one CPU step of plain decode with one sequence."""
    engine = build_engine(EngineConfig(target=MODEL, device="cpu", speculation=SpeculationConfig(profile_s=0)))
    ids = tuple(load_tokenizer(MODEL, EngineConfig().cache_dir).encode(PROMPT))
    plain = SpeculationParams(mode=SpeculationMode.OFF)
    engine.submit(Request("r", ids, stopping=StoppingParams(max_tokens=16, ignore_eos=True), speculation=plain))
    for _ in range(4):
        engine.step()
    with trace.recording() as found:
        events = engine.step()
    if not events:
        raise RuntimeError("the step returned no event")
    return found


def http_call(address: Addresses) -> None:
    """Send a streamed completion over a new connection."""
    connection = http.client.HTTPConnection(address.host, address.http_port)
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "stream": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse().read()
    connection.close()
    if b"[DONE]" not in answer:
        raise RuntimeError(f"POST /v1/completions: {answer[:200]!r}")


def grpc_call(address: Addresses) -> None:
    """Send a streamed generation over a new channel."""
    request = generation_pb2.GenerateStreamRequest(text=PROMPT)
    request.stopping.max_tokens = 8
    with grpc.insecure_channel(f"{address.host}:{address.grpc_port}") as channel:
        messages = list(generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request))
    if len(messages) < 3:
        raise RuntimeError(f"GenerateStream answered {len(messages)} messages")


async def call_files(trace: FilesTrace, calls: list[Callable[[Addresses], None]]) -> list[list[str]]:
    """Files of the front end for each call, socket to socket. Each call is warmed up once."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, with ``--list`` the files behind them; returns 1 if one exceeds its ceiling."""
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the files behind the figures")
    parser.add_argument("--static", action="store_true", help="trace nothing: only figures from the sources")
    options = parser.parse_args(arguments)
    exceeded = []

    def report(key: str, name: str, found: list[str], number: int | None = None) -> None:
        value, ceiling = len(found) if number is None else number, CEILINGS.get(key)
        print(f"{value:7,}  {'' if ceiling is None else f'<= {ceiling:,}':>9}  {name}")
        if ceiling is not None and value > ceiling:
            exceeded.append(f"{name}: {value:,}, at most {ceiling:,} allowed")
        if options.list:
            print("".join(f"{'':22}{line}\n" for line in found), end="")

    lines, graph = product_files(), grimp.build_graph(*PACKAGES, cache_dir=None)
    modules = sorted(filter(is_module, lines))
    kinds = Counter[str]()
    for name, count in lines.items():
        kinds[name.rsplit(".", 1)[1]] += count
    largest = sorted((f"{lines[name]:5} {name}" for name in modules), reverse=True)[:20]
    report("modules", "product modules: written .py files, without __init__, tests, docs, examples", modules)
    by_kind = [f"{count:6} .{kind}" for kind, count in kinds.most_common()]
    report("lines", f"product lines, blank ones too ({' '.join(SOURCES)})", by_kind, sum(lines.values()))
    report("largest", "lines of the largest module", largest, int(largest[0].split()[0]))
    report("cycles", "groups of modules that import each other", module_cycles(product_imports(graph)))
    if not options.static:
        trace = FilesTrace()
        threading.setprofile(trace)
        sys.setprofile(trace)
        report("step", "files that one CPU step of plain decode runs through", step_files(trace))
        http_files, grpc_files = asyncio.run(call_files(trace, [http_call, grpc_call]))
        report("http", "files of the front end in a streamed POST /v1/completions", http_files)
        report("grpc", "files of the front end in a gRPC GenerateStream", grpc_files)
    for line in exceeded:
        print(line, file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
