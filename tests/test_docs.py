"""The documents match the code as far as a machine can check it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import grimp

from draft.protocol import DraftTask
from specdec.models.catalogue import CATALOGUE
from tools.markdown import REPOSITORY
from tools.structure import PACKAGES

PAGES = (*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md")))


def test_links_in_the_documents_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tests_listed_for_a_client_exist() -> None:
    text = (REPOSITORY / "docs" / "clients.md").read_text(encoding="utf-8")
    shown = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", text)
    assert len(shown) > 20
    for file, name in shown:
        assert f"def {name or 'test_'}" in (REPOSITORY / file).read_text(encoding="utf-8"), f"{file}::{name}"
    assert all("test" in row for row in text.splitlines() if re.match(r"\| (?!package|client|---)", row))


def test_the_names_in_the_guides_to_additions_exist() -> None:
    foreign = {"qkv_proj", "gate_up_proj"}  # tensors of families that are not supported
    listed = subprocess.run(
        ["git", "ls-files", "*.py", ":!tests/test_docs.py"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    words = {
        word for file in listed.stdout.split() for word in re.findall(r"\w+", (REPOSITORY / file).read_text("utf-8"))
    }
    for page in ("adding-a-drafter.md", "adding-a-model-family.md"):
        text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
        shown = re.findall(r"`([A-Za-z_][\w.]*)(?:\([\w, ]*\))?`", text)
        assert len(shown) > 40
        for name in shown:
            assert set(name.split(".")) <= words | foreign, f"{page}: {name}"
        for name in re.findall(r"\btask\.(\w+)", text):
            assert hasattr(DraftTask, name), f"{page}: task.{name}"


def test_clients_are_listed_with_their_locked_versions() -> None:
    text = (REPOSITORY / "docs" / "clients.md").read_text(encoding="utf-8")
    python, javascript = (text.split(f"## {name}")[1].split("\n## ")[0] for name in ("Python", "JavaScript"))
    folder = REPOSITORY / "tests" / "third_party_clients"
    locks = [folder / name / "requirements.txt" for name in ("tools", "python")]
    locked = "\n".join(lock.read_text(encoding="utf-8") for lock in locks).lower().replace("_", "-")
    row = re.compile(r"^\| `([^`]+)`[^|]*\| ([\d.]+) \|", re.MULTILINE)
    for name, version in row.findall(python):
        assert re.search(rf"\b{re.escape(name.lower().replace('_', '-'))}=={re.escape(version)}\b", locked), name
    packages = (folder / "node" / "package.json").read_text(encoding="utf-8")
    for name, version in row.findall(javascript):
        assert f'"{name}": "{version}"' in packages, name
    assert len(row.findall(text)) > 15


def test_the_makefile_lists_its_targets() -> None:
    text = Path(REPOSITORY / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE).group(1).split())  # type: ignore[union-attr]
    assert phony == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


def test_every_model_of_the_catalogue_is_listed_with_its_licence() -> None:
    text = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
    rows = {row[0].strip("`"): row for row in (line.strip("| ").split(" | ") for line in text.splitlines())}
    for entry in CATALOGUE.values():
        assert entry.name in rows, f"{entry.name}: give it a row in docs/models.md"
        _, title, licence, in_file, _ = rows[entry.name]
        assert title == entry.title
        assert licence.startswith(entry.licence)
        assert (in_file == "not said") != entry.licence_in_file


def test_the_map_names_exactly_the_folders_of_code() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## The map")[1].split("## Where things go")[0]
    named = set(re.findall(r"`([\w/]+)/`", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    packages = {str(file.parent.relative_to(REPOSITORY)) for file in REPOSITORY.glob("*/**/__init__.py")}
    code = {name for name in packages if not name.startswith((".", "tests/"))}
    code -= {"specdec/api/v1"}  # with specdec/api
    assert not code - named, "give each folder a row in the map"
    assert all((REPOSITORY / name).is_dir() for name in named)


def test_the_places_and_the_tests_of_additions_exist() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8").split("## Where things go")[1]
    shown = re.findall(r"`(?:python -m )?([\w*.]+/[\w/*.]+)`", text.split("\n## ")[0])
    assert len(shown) > 80
    for place in shown:
        assert any(REPOSITORY.glob(place.replace("NAME", "*"))), place


def places_in_the_layers() -> dict[str, int]:
    """Of each module that pyproject.toml gives a layer, its number from the top, among those of its container."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    places = {}
    for contract in project["tool"]["importlinter"]["contracts"]:
        (outer,) = contract.get("containers", [""])
        for place, layer in enumerate(contract["layers"]):
            places.update({f"{outer}.{name}".strip("."): place for name in re.findall(r"[\w.]+", layer)})
    return places


def test_the_map_names_the_highest_modules_that_a_folder_imports() -> None:
    places = places_in_the_layers()

    def rank(module: str) -> tuple[int, ...]:
        parts = module.split(".")
        above = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return tuple(places[name] for name in above if name in places)

    text = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## The map")[1].split("## Where things go")[0]
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\| ([^|]*)\|$", table, re.MULTILINE)
    packages = {folder.replace("/", ".") for folder, _ in rows}
    graph, wrong = grimp.build_graph(*PACKAGES, cache_dir=None), []
    own: dict[str, list[str]] = {package: [] for package in packages}  # the modules of each folder
    for module in graph.modules:
        own[max((name for name in packages if f"{module}.".startswith(f"{name}.")), key=len)].append(module)
    for folder, allowed in rows:
        if "everything" in allowed or "pyproject.toml" in allowed:
            continue
        package = folder.replace("/", ".")
        named = [name.removesuffix(".py").replace("/", ".") for name in re.findall(r"`([^`]+)`", allowed)]
        assert set(named) <= graph.modules, folder
        for module in own[package]:
            for found in graph.find_modules_directly_imported_by(module) - {"specdec"}:
                inside = any(f"{found}.".startswith(f"{name}.") for name in (package, *named))
                below = any(rank(found) > rank(name) > () for name in named)  # (): in no layer
                if not (inside or below or found.rpartition(".")[0] == "specdec"):
                    wrong.append(f"{folder}: {module} imports {found}")
    assert len(table.splitlines()) > 40
    assert not wrong, "correct the last column of the map:\n" + "\n".join(sorted(wrong))


def test_shown_installs_are_of_this_checkout_or_of_a_dependency() -> None:
    """The package index has a `specdec` that is another project's."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *(name for names in extras.values() for name in names)]
    known = {re.split(r"[\[<>=]", name)[0] for name in required}
    kinds = ("*.md", "*.py", "*.sh", "*.yaml", "deploy", ":!tests")
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    shown = []
    for file in listed.stdout.split():
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        assert not re.search(rf"\bspecdec\[({'|'.join(extras)})\b", text), file
        found = re.findall(r"\bpip install (?:-\S+ )*'?([\w.][^\s'`);]*)", text)
        shown += [(file, name) for name in found if not name.endswith(".lock")]
    for file, name in shown:
        own = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", name)
        names = set((own[1] or "").split(",")) - {""} if own else {name}
        assert names <= (set(extras) if own else known), f"{file}: pip install {name}"
    assert len(shown) > 8
    assert project["name"] not in {"specdec", *known}
