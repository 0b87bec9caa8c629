"""The end of a text that may be one token with whatever follows it."""

from __future__ import annotations

LONGEST = 24  # characters; what is longer is hardly one token, and spelling it again takes time


def open_word(text: str, *, breaks_before: bool, digits_alone: bool) -> str:
    """The last word of ``text`` as vocabularies cut texts before they look for tokens (GPT-2 and its descendants):
    letters or digits with one space in front, marks with one space in front, a mark with the letters behind it. Of
    white space in a line the last character goes to the next word.

    ``breaks_before``: line breaks are one with the white space behind them, not with what is in front of them.
    ``digits_alone``: each digit is a token. Empty where the text ends between words, or the word is too long.
    """
    if not text:
        return ""
    kind = _kind(text[-1])
    start = len(text)
    while start and _kind(text[start - 1]) == kind:
        start -= 1
    if kind == "space":
        if not text.endswith("\n"):
            return text[-1]
        return text[start:] if breaks_before and len(text) - start <= LONGEST else ""
    if kind == "digit" and digits_alone:
        return ""
    before = text[start - 1 : start]
    if before == " " or (before and kind == "letter" and before.isspace() and before not in "\r\n"):
        start -= 1
    elif kind == "letter" and _kind(before) == "mark":
        further = text[start - 2 : start - 1] if start > 1 else ""
        if further != " " and _kind(further) != "mark":  # else that mark belongs to what is in front of it
            start -= 1
    word = text[start:]
    if len(word) > LONGEST:
        return ""
    return word if word.isascii() else word[-1]


def _kind(char: str) -> str:
    """Letters, digits, white space, marks; empty for no character."""
    if not char:
        return ""
    if char.isalpha():
        return "letter"
    if char.isdigit():
        return "digit"
    return "space" if char.isspace() else "mark"
