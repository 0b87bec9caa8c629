"""Fill-in-the-middle templates by model family, and prompts taken apart by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FimTemplate:
    """Names of a family's tokens and their order. Of several names the first one in the vocabulary is used."""

    name: str
    prefix: tuple[str, ...]
    suffix: tuple[str, ...]
    middle: tuple[str, ...] = ()
    suffix_first: bool = False
    """The prompt is suffix, prefix and then the middle, which has no token of its own."""
    repo: tuple[str, ...] = ()
    """Token before the project's name, if the family has one."""
    file: tuple[str, ...] = ()
    """Token before each file's name, if the family has one."""
    newline: bool = True
    """A line break follows the project's name."""
    opens_file: bool = True
    """The file to fill in is announced like the other files."""
    heading: str | None = None
    """Text inside the prefix that announces a file without a token; None: a comment in the file's language."""
    spaced: bool = False
    """The vocabulary begins a text with a space, and so does the prefix."""
    ends: tuple[str, ...] = ()
    """Further tokens that end a middle."""


TEMPLATES = (
    FimTemplate(
        "qwen",  # Qwen2.5-Coder, Qwen3-Coder, Granite 4, CodeGemma
        ("<|fim_prefix|>",),
        ("<|fim_suffix|>",),
        ("<|fim_middle|>",),
        repo=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|file_separator|>", "<|filename|>"),
    ),
    FimTemplate(
        "starcoder",  # StarCoder, StarCoder2, tiny_starcoder, Granite Code, StableCode
        ("<fim_prefix>",),
        ("<fim_suffix>",),
        ("<fim_middle>",),
        repo=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        newline=False,
        opens_file=False,
        ends=("</fim_middle>",),
    ),
    FimTemplate("santacoder", ("<fim-prefix>",), ("<fim-suffix>",), ("<fim-middle>",)),
    FimTemplate(
        "codellama",
        ("▁<PRE>", "<PRE>"),
        ("▁<SUF>", "<SUF>"),
        ("▁<MID>", "<MID>"),
        spaced=True,
        ends=("▁<EOT>", "<EOT>"),
    ),
    FimTemplate(
        "deepseek",  # bars and underscores are full-width
        ("<\uff5cfim\u2581begin\uff5c>",),
        ("<\uff5cfim\u2581hole\uff5c>",),
        ("<\uff5cfim\u2581end\uff5c>",),
        ends=("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    ),
    FimTemplate("codestral", ("[PREFIX]",), ("[SUFFIX]",), suffix_first=True, heading="+++++ {}\n"),
    FimTemplate("glm", ("<|code_prefix|>",), ("<|code_suffix|>",), ("<|code_middle|>",)),
    FimTemplate("seed", ("<[fim-prefix]>",), ("<[fim-suffix]>",), ("<[fim-middle]>",)),
)


@dataclass(frozen=True, slots=True)
class FimParts:
    """The parts of a fill-in-the-middle prompt, without the template's tokens. Any other prompt is all ``prefix``."""

    head: list[int]
    """Tokens before the document."""
    prefix: list[int]
    """The document before the cursor."""
    suffix: list[int]
    """The document after the cursor."""
    middle: list[int]
    """What is already written at the cursor."""


class FimParser:
    """Splits prompts by the fill-in-the-middle tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._markers: list[tuple[int, int, int | None]] = []  # prefix, suffix, middle; None: the template has none
        for template in TEMPLATES:
            prefix, suffix, middle = (
                next((found for name in names if (found := tokenizer.token_id(name)) is not None), None)
                for names in (template.prefix, template.suffix, template.middle)
            )
            if prefix is not None and suffix is not None and (middle is not None or not template.middle):
                self._markers.append((prefix, suffix, middle))

    def parts(self, prompt: Sequence[int]) -> FimParts:
        """The parts of a prompt in the order prefix, suffix, middle or suffix, prefix, middle.

        Where a template has no token for the middle, the text there continues the prefix.
        """
        ids = list(prompt)
        for *markers, last in self._markers:
            prefix, suffix = (ids.index(marker) if marker in ids else -1 for marker in markers)
            middle = len(ids) if last is None else ids.index(last) if last in ids else -1
            if last is not None and 0 <= prefix < suffix < middle:
                return FimParts(ids[:prefix], ids[prefix + 1 : suffix], ids[suffix + 1 : middle], ids[middle + 1 :])
            if 0 <= suffix < prefix < middle:
                return FimParts(ids[:suffix], ids[prefix + 1 : middle], ids[suffix + 1 : prefix], ids[middle + 1 :])
        return FimParts([], ids, [], [])
