"""Reads a tokenizer from a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.errors import ModelError
from specdec.models.hf_source import read_json
from specdec.models.model_config import ModelConfig
from specdec.models.tokenizer import Tokenizer
from specdec.models.tokenizer_info import TokenizerInfo

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of ``folder``; ``config`` gives the begin and end ids its own files do not.

    Raises:
        ModelError: there is no ``tokenizer.json``, or it can not be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder}: no tokenizer.json; load the tokenizer once with transformers' AutoTokenizer and "
            "save_pretrained it into the folder"
        )
    data = read_json(path)
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    named = {key: text for key in _NAMED if (text := _content(settings.get(key))) is not None}
    bos = _token_id(data, named.get("bos_token"), config.bos_id)
    eos = _token_id(data, named.get("eos_token"), None)
    info = TokenizerInfo(
        bos_id=bos,
        add_bos=bool(settings.get("add_bos_token", _template_adds(data.get("post_processor"), named.get("bos_token")))),
        eos_ids=tuple(dict.fromkeys((*config.eos_ids, *(() if eos is None else (eos,))))),
        chat_template=_chat_template(folder, settings),
        template_variables=named,
    )
    return Tokenizer(path.read_text(encoding="utf-8"), info)


def _token_id(data: dict[str, Any], name: str | None, default: int | None) -> int | None:
    if name is None:
        return default
    added = {token["content"]: token["id"] for token in data.get("added_tokens", [])}
    vocabulary = data.get("model", {}).get("vocab", {})
    found = added.get(name, vocabulary.get(name) if isinstance(vocabulary, dict) else None)
    return default if found is None else found


def _template_adds(processor: dict[str, Any] | None, bos: str | None) -> bool:
    """Whether the post-processor puts the begin token before a text."""
    if processor is None or bos is None:
        return False
    if processor.get("type") == "Sequence":
        return any(_template_adds(step, bos) for step in processor["processors"])
    first: dict[str, Any] = next(iter(processor.get("single") or []), {})
    return first.get("SpecialToken", {}).get("id") == bos


def _content(token: Any) -> str | None:
    """A special token is written as a string, or as an object that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    given = settings.get("chat_template")
    if given is None and (folder / "chat_template.json").exists():
        given = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(given, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in given}
        return named.get("default", next(iter(named.values()), None))
    return given
