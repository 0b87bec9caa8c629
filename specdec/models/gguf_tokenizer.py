"""Builds a tokenizer from the vocabulary inside a GGUF file, and caches it on disk.

transformers can build one too, but takes ten seconds for a large vocabulary, and splits texts the same way for nearly
all byte-level BPE models, which changes tokens (SmolLM2 splits off single digits).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specdec.atomic_file import replacing
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import well_formed
from specdec.models.embedding import gguf_pooling
from specdec.models.gguf import GGUFFile
from specdec.models.tokenizer import TokenizerInfo

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
_LONGEST_JOINED = 1024  # characters of a token: every way to cut one in two is tried
_PADDING = re.compile(r"\[PAD\d+\]")  # rows that only round the vocabulary up

# Tokens that end an answer if the vocabulary marks them as control tokens
_END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
)  # fmt: skip

_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_SEED = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> splitting; None is GPT-2's own
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,  # SmolLM3
    "dbrx": _LLAMA3,  # Granite 4, Phi-4
    "gpt-4o": _O200K,  # Phi-4-mini
    "seed-coder": _SEED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def convert_gguf_tokenizer(file: GGUFFile) -> tuple[str, TokenizerInfo]:
    """The text of a ``tokenizer.json`` and its `TokenizerInfo`, from the file's metadata.

    Raises:
        UnsupportedModelError: the kind of tokenizer, or its text splitting, is not supported.
        ModelError: the file holds no vocabulary, or an inconsistent one.
    """
    with well_formed(str(file.path)):
        return _converted(file, file.metadata)


def _converted(file: GGUFFile, meta: dict[str, Any]) -> tuple[str, TokenizerInfo]:
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelError(f"{file.path}: holds no tokenizer; convert the model again, or use its Hugging Face folder")
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens but {len(types)} token types; the file is corrupt")
    if set(map(type, types)) != {int}:  # no token would be a special one
        raise TypeError("tokenizer.ggml.token_type must be a list of integers")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens, types)
    else:
        raise UnsupportedModelError(f"{file.path}: tokenizer kind '{kind}' is not supported; use the model's HF folder")
    strips = kind == "llama" and meta.get("general.architecture") == "phi3"
    _add_named(tokenizer, tokens, types, strips=strips)
    # as llama.cpp takes it where the file does not say
    begins = kind == "llama" or meta.get("tokenizer.ggml.pre") in _IGNORE_MERGES
    info = _info(meta, tokens, types, begins=begins)
    return tokenizer.to_str(), replace(info, pooling=gguf_pooling(meta, file.path))


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    pre = str(file.metadata.get("tokenizer.ggml.pre", "default"))
    if "tokenizer.ggml.pre" not in file.metadata:
        logger.warning("%s: lacks tokenizer.ggml.pre, texts are split as GPT-2's; use the model's HF folder", file.path)
    if pre not in _SPLITS and pre not in _SINGLE_DIGITS:
        raise UnsupportedModelError(f"{file.path}: text splitting '{pre}' is not known; use the model's HF folder")
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(_bpe(file, _vocabulary(tokens, types), merges, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _SINGLE_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif (pattern := _SPLITS[pre]) is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: the vocabulary has no scores for its tokens; the file is corrupt")
    vocabulary = _vocabulary(tokens, types)
    if (longest := max(map(len, tokens))) > _LONGEST_JOINED:
        raise ModelError(f"{file.path}: a token of {longest} characters, where a few dozen are usual; it is damaged")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(tokens, types, scores)
    tokenizer = Tokenizer(
        _bpe(file, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(file: GGUFFile, vocabulary: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{file.path}: the vocabulary is inconsistent ({reason}); fetch the file again") from None


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    entries = enumerate(zip(tokens, types, strict=True))
    return {token: i for i, (token, kind) in entries if kind != _UNUSED or not _PADDING.fullmatch(token)}


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to split a token into two others, by falling score of the token.

    As BPE merges these do what SentencePiece does, which joins the neighbours whose union scores highest. Of equal
    scores it joins the leftmost: among runs of spaces, to which Mistral gives one, a longer left part first does so.
    """
    kinds = (_NORMAL, _USER_DEFINED)
    joinable = {t: score for t, kind, score in zip(tokens, types, scores, strict=True) if kind in kinds}
    ranked = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in joinable.items()
        for cut in range(1, len(token))
        if token[:cut] in joinable and token[cut:] in joinable
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_named(tokenizer: Tokenizer, tokens: list[str], types: list[int], *, strips: bool) -> None:
    """strips: drop the space behind such tokens, as Phi-3's own tokenizer does; files do not say so."""
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(
            [
                AddedToken(
                    token, normalized=False, special=kind == _CONTROL, rstrip=strips and token not in _UNSTRIPPED
                )
                for token, own in zip(tokens, types, strict=True)
                if own == kind
            ]
        )


def _info(meta: dict[str, Any], tokens: list[str], types: list[int], *, begins: bool) -> TokenizerInfo:
    def given(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        return int(value) if value is not None and 0 <= int(value) < len(tokens) else None

    template, tool_template = (meta.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    for each in (template, tool_template):
        if not (each is None or isinstance(each, str)):
            raise TypeError(f"tokenizer.chat_template must be text, got {each!r}")
    ends = [given("eos"), given("eot"), given("eom")]
    ends += [i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL and t in _END_OF_TURN]
    fields = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: given(field) for name, field in fields.items()}
    return TokenizerInfo(
        bos_id=given("bos"),
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", begins)),
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        chat_template=template,
        tool_template=tool_template,
        template_variables={name: tokens[i] for name, i in named.items() if i is not None},
        end_id=given("eos") if meta.get("tokenizer.ggml.add_eos_token") else None,
    )


logger = logging.getLogger(__name__)

_FORMAT = 7  # of cached tokenizers; raise it when the conversion or the file changes, so that older ones are not used


class TokenizerCache:
    """One file per tokenizer: a line with the digest of what follows, a line with its `TokenizerInfo`, then the text of
    its ``tokenizer.json``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> tuple[str, TokenizerInfo] | None:
        """The tokenizer cached under ``key``; None if there is none that is readable, whole and of this format."""
        place = self._place(key)
        try:
            head, _, content = place.read_bytes().partition(b"\n")
            data = json.loads(head)
            if data["format"] != _FORMAT:
                return None
            if hashlib.sha256(content).hexdigest() != data["sha256"]:
                raise ValueError("digest differs")
            info, _, raw = content.partition(b"\n")
            fields = json.loads(info)
            return raw.decode("utf-8"), TokenizerInfo(**fields | {"eos_ids": tuple(fields["eos_ids"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s: cached tokenizer cannot be used (%s), converting again", place, error)
            return None

    def write(self, key: str, serialised: str, info: TokenizerInfo) -> None:
        """Cache a tokenizer. A failure is only logged, since the model runs without the cache."""
        content = json.dumps(asdict(info)).encode() + b"\n" + serialised.encode("utf-8")
        data = {"format": _FORMAT, "sha256": hashlib.sha256(content).hexdigest()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._place(key), 0o666) as file:
                file.write(json.dumps(data).encode() + b"\n" + content)
        except OSError as error:
            logger.warning("%s: tokenizer cannot be cached (%s)", self._folder, error)

    def _place(self, key: str) -> Path:
        return self._folder / f"{key}.tokenizer"
