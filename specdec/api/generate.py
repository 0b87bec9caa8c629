"""Generate the gRPC stubs next to their .proto files: ``python -m specdec.api.generate`` (needs the `dev` extra)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = "specdec/api/v1"


def generate(out: Path) -> None:
    """Write the stubs of every .proto file to folder ``out``.

    Raises:
        RuntimeError: protoc refused a file; standard error says why.
    """
    from grpc_tools import protoc

    protos = sorted((ROOT / PROTOS).glob("*.proto"))
    services = [p for p in protos if "\nservice " in p.read_text(encoding="utf-8")]
    plugins = [f"--plugin={p}={Path(sys.executable).parent / p}" for p in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    runs = [
        (protos, [f"--python_out={out}", f"--mypy_out=quiet:{out}"]),
        (services, [f"--grpc_python_out={out}", f"--mypy_grpc_out=quiet:{out}"]),
    ]
    for files, outputs in runs:
        code = protoc.main(["protoc", f"-I{ROOT}", *plugins, *outputs, *map(str, files)])
        if code != 0:
            raise RuntimeError(f"protoc ended with code {code}")


if __name__ == "__main__":
    generate(ROOT)
