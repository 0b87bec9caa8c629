"""The .proto files are lint-clean, and the committed stubs are theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specdec.api.generate import ROOT, generate
from specdec.api.v1 import generation_pb2 as pb

FOLDER = "specdec/api/v1"


def test_committed_stubs_match_the_protos(tmp_path: Path) -> None:
    generate(tmp_path)
    fresh = {p.name: p.read_text() for p in (tmp_path / FOLDER).iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / FOLDER).glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed), "run `make proto`"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"


def test_protos_pass_buf_lint_and_format() -> None:
    buf = Path(sys.executable).parent / "buf"
    for command in (["lint"], ["format", "--diff", "--exit-code"]):
        done = subprocess.run([buf, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unary_and_stream_requests_have_the_same_fields() -> None:
    def fields(message: type) -> dict[str, tuple[int, str]]:
        found = message.DESCRIPTOR.fields  # type: ignore[attr-defined]
        return {f.name: (f.number, f.message_type.name if f.message_type else str(f.type)) for f in found}

    assert fields(pb.GenerateRequest) == fields(pb.GenerateStreamRequest)
