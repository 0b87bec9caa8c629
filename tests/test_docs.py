"""The documents tell today's truth where a machine can check it."""

from __future__ import annotations

import re
from pathlib import Path

from tools.markdown import REPOSITORY


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_makefile_lists_its_targets() -> None:
    text = Path(REPOSITORY / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split())  # type: ignore[union-attr]
    assert phony == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
