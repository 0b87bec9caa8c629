"""Generate the gRPC stubs next to their .proto files: ``python -m specdec.api.generate`` (needs the `dev` extra)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "specdec/api/v1").glob("*.proto"))


def run_protoc(files: Iterable[Path], *options: str) -> None:
    """Let protoc read ``files``.

    Raises:
        RuntimeError: it refused a file; standard error says why.
    """
    from grpc_tools import protoc

    code = protoc.main(["protoc", f"-I{ROOT}", *options, *map(str, files)])
    if code != 0:
        raise RuntimeError(f"protoc ended with code {code}")


def generate(out: Path) -> None:
    """Write the stubs of every .proto file to folder ``out``; raises as `run_protoc`."""
    services = [p for p in PROTOS if "\nservice " in p.read_text(encoding="utf-8")]
    plugins = [f"--plugin={p}={Path(sys.executable).parent / p}" for p in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    run_protoc(PROTOS, *plugins, f"--python_out={out}", f"--mypy_out=quiet:{out}")
    run_protoc(services, *plugins, f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}")


if __name__ == "__main__":
    generate(ROOT)
