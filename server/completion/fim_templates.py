"""How families of models are asked to fill in the middle, and the tokens of their templates in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from server.interfaces import TokenizerLike
from specdec.errors import ConfigError


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


# Tokens that begin something else than a middle, whatever the family
COMMON_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>",
    "<|file_separator|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<|filename|>", "<|reponame|>", "<|EOT|>",
)  # fmt: skip

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

# What a model without such tokens may still know: where files begin
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
    """Ids; -1 where there is none. ``names``: those that can not be part of what is filled in, and their names."""

    template: FimTemplate
    prefix: int
    suffix: int
    middle: int
    repo: int
    file: int
    names: dict[int, str]

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids after which a middle is over."""
        return tuple(sorted(self.names))

    @property
    def fills_in(self) -> bool:
        """Whether what follows the gap can be shown to the model."""
        return self.suffix >= 0

    @staticmethod
    def of(tokenizer: TokenizerLike, name: str = "") -> FimTokens:
        """Those of the first family whose tokens the vocabulary has, or of the family ``name``; where there is none,
        those that mark files, for prompts that end at the gap.

        Raises:
            ConfigError: ``name`` is no family, or its tokens are not in the vocabulary.
        """
        known = [template for template in TEMPLATES if name in ("", template.name)]
        for template in known:
            found = _resolve(tokenizer, template)
            if found is not None:
                return found
        if name and known:
            raise ConfigError(f"FIM template {name!r}: the model has no such tokens; leave it unset to have one chosen")
        if name:
            names = ", ".join(template.name for template in TEMPLATES)
            raise ConfigError(f"unknown FIM template {name!r}; one of {names}, or unset")
        return FimTokens.prefix_only(tokenizer)

    @staticmethod
    def prefix_only(tokenizer: TokenizerLike) -> FimTokens:
        """Tokens for prompts that end at the gap."""
        repo, file = (_first(tokenizer, names) for names in (PREFIX_ONLY.repo, PREFIX_ONLY.file))
        return FimTokens(PREFIX_ONLY, -1, -1, -1, repo, file, _named(tokenizer, COMMON_ENDS))


def _resolve(tokenizer: TokenizerLike, template: FimTemplate) -> FimTokens | None:
    prefix, suffix, middle, repo, file = (
        _first(tokenizer, names)
        for names in (template.prefix, template.suffix, template.middle, template.repo, template.file)
    )
    if min(prefix, suffix) < 0 or (template.middle and middle < 0):
        return None
    names = (*template.prefix, *template.suffix, *template.middle, *template.ends, *COMMON_ENDS)
    return FimTokens(template, prefix, suffix, middle, repo, file, _named(tokenizer, names))


def _first(tokenizer: TokenizerLike, names: tuple[str, ...]) -> int:
    return next((found for name in names if (found := _token(tokenizer, name)) >= 0), -1)


def _named(tokenizer: TokenizerLike, names: tuple[str, ...]) -> dict[int, str]:
    return {found: name for name in names if (found := _token(tokenizer, name)) >= 0}


def _token(tokenizer: TokenizerLike, name: str) -> int:
    """Id of the one token that ``name`` is; not every file marks these as special, so they are tried out."""
    known = tokenizer.special_id(name)
    if known is not None:
        return known
    ids = tokenizer.encode(name, add_special=False, parse_special=True)
    spelled = [tokenizer.token_bytes(i).decode(errors="replace") for i in ids]
    return ids[0] if spelled in ([name], [name.replace("▁", " ")]) else -1
