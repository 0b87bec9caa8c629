"""Grammars: the message a client fills, and what the engine is given."""

from __future__ import annotations

import json

from specdec.api.v1 import options_pb2 as options
from specdec.errors import ViolationCollector
from specdec.types import GrammarKind, GrammarParams


def grammar_message(grammar: GrammarParams) -> options.GrammarOptions:
    """``grammar`` as a client sends it."""
    if grammar.kind == GrammarKind.JSON_OBJECT:
        return options.GrammarOptions(json_object=True)
    if grammar.kind == GrammarKind.CHOICE:
        return options.GrammarOptions(choice=options.Choices(values=json.loads(grammar.text)))
    message = options.GrammarOptions()
    setattr(message, grammar.kind.value, grammar.text)
    return message


def read_grammar(message: options.GrammarOptions, seen: ViolationCollector) -> GrammarParams | None:
    """What ``message`` asks for; None when it is bad, which ``seen`` is told."""
    which = message.WhichOneof("kind")
    if which is None:
        seen.check(False, "grammar", f"one of {', '.join(kind.value for kind in GrammarKind)} is needed")
        return None
    kind = GrammarKind(which)
    if kind == GrammarKind.JSON_OBJECT:
        seen.check(message.json_object, "grammar.json_object", "must be true; leave grammar unset for any text")
        return GrammarParams(kind)
    if kind == GrammarKind.CHOICE:
        return GrammarParams(kind, json.dumps(list(message.choice.values), ensure_ascii=False))
    return GrammarParams(kind, getattr(message, which))
