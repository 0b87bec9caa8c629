"""How a comment begins in a language, or in a file of a name."""

from __future__ import annotations

_HASH = (
    "python", "py", "ruby", "rb", "shellscript", "sh", "bash", "zsh", "yaml", "yml", "perl", "pl", "r", "toml",
    "makefile", "dockerfile", "elixir", "ex", "nix", "cmake",
)  # fmt: skip
_DASH = ("sql", "lua", "haskell", "hs", "ada")
_MARKS = dict.fromkeys(_HASH, "#") | dict.fromkeys(_DASH, "--")


def comment_mark(language: str, path: str) -> str:
    """``language`` as editors name it; where it is empty, the end of ``path`` counts."""
    name = language or path.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
    return _MARKS.get(name.lower(), "//")
