"""`make structure` counts correctly, and the tree stays below the ceilings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import structure
from tools.markdown import REPOSITORY


def test_the_tree_is_below_the_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    failed = structure.main([])
    printed, exceeded = capsys.readouterr()
    assert not failed, f"{exceeded}Remove as much elsewhere, or raise CEILINGS in tools/structure.py and say why."
    for name in ("product modules", "product lines", "largest module", "import each other"):
        assert name in printed


def test_an_exceeded_ceiling_fails_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "CEILINGS", dict.fromkeys(structure.CEILINGS, 10**9) | {"modules": 3})
    assert structure.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("product modules")
    assert line.endswith("at most 3 allowed")


def test_only_hand_written_files_are_counted() -> None:
    lines = structure.product_files()
    assert lines["specdec/core/tree.py"] == len((REPOSITORY / "specdec/core/tree.py").read_text().splitlines())
    assert {Path(name).suffix for name in lines} <= set(structure.SOURCES)
    assert not [name for name in lines if name.startswith(("tests/", "docs/", "examples/")) or "_pb2" in name]


@pytest.mark.parametrize(
    ("imports", "cycle"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, set()),
        ({"a": ["b"], "b": ["a"], "c": ["a"]}, {"a", "b"}),
        ({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}, {"a", "b", "c"}),
    ],
)
def test_a_cycle_is_found(imports: dict[str, list[str]], cycle: set[str]) -> None:
    assert set(structure.module_cycle(imports)) == cycle
