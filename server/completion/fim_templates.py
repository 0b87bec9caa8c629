"""The tokens of a fill-in-the-middle template in one vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from server.interfaces import TokenizerLike
from specdec.errors import ConfigError
from specdec.models.fim import TEMPLATES, FimTemplate

# Tokens that begin something else than a middle, whatever the family
COMMON_ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>",
    "<|file_separator|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<|filename|>", "<|reponame|>", "<|EOT|>",
)  # fmt: skip

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
