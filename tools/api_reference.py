"""Writes docs/api.md's tables from the .proto files and the OpenAPI document: `python -m tools.api_reference`."""

from __future__ import annotations

from tools.code_map import ROOT
from tools.grpc_reference import grpc_reference
from tools.http_reference import http_reference
from tools.marked_part import with_parts

DOCUMENT = ROOT / "docs" / "api.md"


def updated(document: str) -> str:
    """``document`` with its tables brought up to date."""
    return with_parts(document, {"grpc": grpc_reference(), "http": http_reference()})


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
