"""A model that the package index carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One file inside one package; the parts of a model joined in order are its .gguf file.

    ``requirement`` is the package with its exact version, ``member`` the file's path inside the wheel, ``size`` and
    ``sha256`` are the file's own.
    """

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A catalogue model: its name, what it is, and the ``size`` in bytes and ``sha256`` of the joined .gguf file."""

    name: str
    title: str
    licence: str
    size: int
    sha256: str
    parts: tuple[ModelPart, ...]

    @property
    def file_name(self) -> str:
        """The file's name in the cache."""
        return f"{self.name}.gguf"
