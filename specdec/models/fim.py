"""How families of models are asked to fill in the middle: the names and the order of their tokens."""

from __future__ import annotations

from dataclasses import dataclass


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
