"""How one family of models is asked to fill in the middle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FimTemplate:
    """Names of the tokens and their order; each token may have several names, the first that a vocabulary has is taken.

    ``suffix_first``: suffix, prefix and then the middle, which has no token of its own. ``repo`` and ``file``: the
    tokens in front of the project's name and of each file's, where the family has them; ``newline``: a line break
    follows the project's name. ``opens_file``: the file to be filled in is announced like the others. ``heading``:
    how a file is announced without a token, as text inside the prefix; None: as a comment of its language.
    ``spaced``: the vocabulary begins a text with a space, and so does the prefix. ``ends``: further tokens after which
    a middle is over.
    """

    name: str
    prefix: tuple[str, ...]
    suffix: tuple[str, ...]
    middle: tuple[str, ...] = ()
    suffix_first: bool = False
    repo: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    newline: bool = True
    opens_file: bool = True
    heading: str | None = None
    spaced: bool = False
    ends: tuple[str, ...] = ()
