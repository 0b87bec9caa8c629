"""Fill-in-the-middle templates by model family, their tokens in a vocabulary, and the parts of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """The prompt is suffix, prefix and then the middle."""
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
    FimTemplate("seed", ("<[fim-prefix]>",), ("<[fim-suffix]>",), ("<[fim-middle]>",), suffix_first=True),
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
        self._templates = list(_known(tokenizer))

    def parts(self, prompt: Sequence[int]) -> FimParts:
        """The parts of a prompt in the order prefix, suffix, middle or suffix, prefix, middle.

        Where a template has no token for the middle, the text there continues the prefix.
        """
        ids = list(prompt)
        for tokens in self._templates:
            markers = (tokens.prefix, tokens.suffix, tokens.middle)
            prefix, suffix, middle = (ids.index(marker) if marker in ids else -1 for marker in markers)
            if tokens.middle < 0:
                middle = len(ids)
            elif 0 <= prefix < suffix < middle:
                return FimParts(ids[:prefix], ids[prefix + 1 : suffix], ids[suffix + 1 : middle], ids[middle + 1 :])
            if 0 <= suffix < prefix < middle:
                return FimParts(ids[:suffix], ids[prefix + 1 : middle], ids[suffix + 1 : prefix], ids[middle + 1 :])
        return FimParts([], ids, [], [])


# Tokens that never occur in a middle, in any family
COMMON_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>",
    "<|file_separator|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<|filename|>", "<|reponame|>", "<|EOT|>",
)  # fmt: skip

# For models without fill-in-the-middle tokens, which may still mark where files begin
PREFIX_ONLY = FimTemplate(
    "prefix-only",
    (),
    (),
    repo=("<|repo_name|>", "<repo_name>", "<reponame>"),
    file=("<|file_sep|>", "<file_sep>", "<filename>"),
    newline=False,
    spaced=True,
)


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The ids of a template's tokens in one vocabulary; -1: it has no such token."""

    template: FimTemplate
    prefix: int
    suffix: int
    middle: int
    repo: int
    file: int
    names: dict[int, str]  # by id, the tokens that cannot be part of a middle

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a middle."""
        return tuple(sorted(self.names))

    @property
    def fills_in(self) -> bool:
        """Whether prompts can contain the text after the gap."""
        return self.suffix >= 0

    @staticmethod
    def of(tokenizer: Tokenizer) -> FimTokens:
        """The tokens of the first template that the vocabulary has; if there is none, those of `prefix_only`."""
        return next(_known(tokenizer), None) or FimTokens.prefix_only(tokenizer)

    @staticmethod
    def prefix_only(tokenizer: Tokenizer) -> FimTokens:
        """The tokens that mark files, for prompts that end at the gap."""
        return _tokens(tokenizer, PREFIX_ONLY)


def _known(tokenizer: Tokenizer) -> Iterator[FimTokens]:
    """The tokens of each template that the vocabulary has."""
    for template in TEMPLATES:
        found = _tokens(tokenizer, template)
        if min(found.prefix, found.suffix) >= 0 and (found.middle >= 0 or not template.middle):
            yield found


def _tokens(tokenizer: Tokenizer, template: FimTemplate) -> FimTokens:
    prefix, suffix, middle, repo, file = (
        _first(tokenizer, names)
        for names in (template.prefix, template.suffix, template.middle, template.repo, template.file)
    )
    ending = (*template.prefix, *template.suffix, *template.middle, *template.ends, *COMMON_ENDS)
    names = {found: name for name in ending if (found := tokenizer.token_id(name)) is not None}
    return FimTokens(template, prefix, suffix, middle, repo, file, names)


def _first(tokenizer: Tokenizer, names: tuple[str, ...]) -> int:
    return next((found for name in names if (found := tokenizer.token_id(name)) is not None), -1)
