"""specdec: a speculative-decoding-first, low-latency LLM serving engine."""

import sys
from pathlib import Path

__version__ = "0.2.0"

_HERE = Path(__file__).resolve().parent
# `server`, `draft` and the others lie inside of what is installed, and beside this folder in a checkout.
_PARTS = _HERE / "_parts" if (_HERE / "_parts").is_dir() else _HERE.parent
if str(_PARTS) not in sys.path:
    sys.path.append(str(_PARTS))  # at its end: who imports this as a library may have modules of these names


def put_own_modules_first() -> None:
    """Make `import server` find this package's module, not another of that name. For programs of this package only."""
    sys.path.remove(str(_PARTS))
    sys.path.insert(0, str(_PARTS))
