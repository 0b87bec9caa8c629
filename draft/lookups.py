"""The native part of lookup drafters (`csrc/`): it matches texts and orders what followed in them."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from draft.protocol import DraftTask
from specdec.control.inputs import Match
from specdec.core.tree import TokenTree
from verify_kernels.cpu.library import Signatures, load_built

SOURCES = Path(__file__).parent / "csrc"


class Candidate(ctypes.Structure):
    """A node to propose. Mirrors Candidate in csrc/best_first.h."""

    _fields_ = (("chance", c_double), ("parent", c_int32), ("token", c_int32), ("rank", c_int32))


_TEXT = (c_void_p, c_int64)  # the buffer of an array of 32-bit tokens; it is valid until the array changes
_NEXT = (c_int32, c_void_p, c_int32, c_double, c_int32, POINTER(Candidate))
SIGNATURES: Signatures = {
    "sd_store_new": (c_void_p, c_int64),
    "sd_store_free": (None, c_void_p),
    "sd_store_write": (None, c_void_p, *_TEXT),
    "sd_suffix_new": (c_void_p, c_void_p, c_int32, *_TEXT),
    "sd_suffix_free": (None, c_void_p),
    "sd_suffix_match": (c_int32, c_void_p, *_TEXT, POINTER(c_int64)),
    "sd_suffix_next": _NEXT,
    "sd_index_new": (c_void_p,),
    "sd_index_free": (None, c_void_p),
    "sd_index_match": (c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_int32),
    "sd_index_next": _NEXT,
}


@functools.cache
def load_lookups(cache_dir: Path) -> ctypes.PyDLL:
    """The library, built when this machine has none for these sources.

    Its calls take microseconds and keep the interpreter's lock.

    Raises:
        KernelError: it cannot be built or loaded.
    """
    return load_built(cache_dir, SOURCES, ctypes.PyDLL, SIGNATURES)


class Native:
    """An object of ``library``; it ends with this one. kind: its name in the library's functions."""

    def __init__(self, library: ctypes.PyDLL, kind: str, *arguments: Any) -> None:
        self._free = getattr(library, f"sd_{kind}_free")
        self._as_parameter_ = getattr(library, f"sd_{kind}_new")(*arguments)

    def __del__(self) -> None:
        self._free(self)


class Reader(Native):
    """What may follow one sequence."""

    def __init__(self, library: ctypes.PyDLL, kind: str, *arguments: Any) -> None:
        super().__init__(library, kind, *arguments)
        self._next, self._candidate = getattr(library, f"sd_{kind}_next"), Candidate()

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        """Add the likeliest continuations of what was last matched to ``tree``, which is its root alone."""
        found, node = self._candidate, 0
        while len(tree) <= task.max_nodes:
            width = task.width if node >= 0 and tree.depths[node] < task.max_depth else 0
            if not self._next(self, node, tree.scores[node], width, found):
                return
            node = task.add(tree, found.parent, found.token, found.chance, found.rank)


def match_of(length: int) -> Match:
    """The match of a longest context of ``length`` tokens."""
    return Match(min(length, Match.STRONG))
