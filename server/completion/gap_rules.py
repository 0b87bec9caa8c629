"""The text rules that follow from where a gap is."""

from __future__ import annotations

from dataclasses import replace

from server.completion.completion_options import CompletionOptions
from server.completion.gap import Gap
from server.completion.open_brackets import open_brackets
from specdec.types import TextRules

SUFFIX_CHARACTERS = 512


def gap_rules(gap: Gap, options: CompletionOptions) -> TextRules | None:
    """The rules asked for, and those that ``options`` want derived: the indentation of the cursor's line, the brackets
    open there, the text behind. None where there are none."""
    rules = options.stopping.rules or TextRules()
    head = gap.line_head
    if options.dedent and rules.min_indent is None:
        # A line that stands at the margin can not be left to its left.
        rules = replace(rules, min_indent=len(head) - len(head.lstrip(" \t")) or None)
    if options.bracket and rules.closers is None:
        closers, quote = open_brackets(gap.prefix, gap.suffix)
        rules = replace(rules, closers=closers, quote=quote)
    if options.suffix and not rules.suffix:
        lead = "\n" + head if not head.strip() and len(head) < len(gap.prefix) else ""
        rules = replace(rules, suffix=gap.suffix[:SUFFIX_CHARACTERS], lead=lead)
    return None if rules == TextRules() else rules
