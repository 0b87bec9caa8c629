"""Real text to measure on: Python's own standard library, which every machine has."""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import textwrap


def long_text() -> str:
    """Some 100,000 characters of real code."""
    return "\n".join(inspect.getsource(module) for module in (textwrap, json.decoder, argparse))
