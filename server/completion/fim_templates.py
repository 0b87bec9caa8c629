"""The families that are known to fill in the middle."""

from __future__ import annotations

from server.completion.fim_template import FimTemplate

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
