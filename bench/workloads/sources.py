"""Real source code that every machine has: Python's own standard library."""

from __future__ import annotations

import importlib
import inspect
from functools import reduce


def source_of(place: str) -> str:
    """Source text of ``module:qualified.name``, or of a whole ``module:``, without the indentation it has in common.

    Raises:
        ValueError: there is no such thing in this Python, or no source of it.
    """
    module_name, _, path = place.partition(":")
    try:
        module = importlib.import_module(module_name)
        found = reduce(getattr, path.split("."), module) if path else module
        text = inspect.getsource(found)
    except (ImportError, AttributeError, TypeError, OSError) as error:
        raise ValueError(f"{place}: no source in this Python ({error})") from None
    return inspect.cleandoc("\n" + text) + "\n"
