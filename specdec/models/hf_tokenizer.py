"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, its settings and chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.core.fields import encodable
from specdec.errors import ModelError
from specdec.models.checkpoint import MAX_TOKENIZER_BYTES, read_json, read_text_file, well_formed
from specdec.models.embedding import folder_pooling
from specdec.models.hf import language_model
from specdec.models.tokenizer import Tokenizer, TokenizerInfo

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of ``folder``, whose model has an embedding of ``vocab_size`` rows.

    Raises:
        ModelError: there is no ``tokenizer.json``, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder}: no tokenizer.json; load the tokenizer once with transformers' AutoTokenizer and "
            "save_pretrained it into the folder"
        )
    serialised = read_text_file(path, MAX_TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.shared(serialised, TokenizerInfo())
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    settings, older, raw, generation = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json")
    )
    with well_formed(f"{folder}: config.json or generation_config.json"):
        model = language_model(raw)
        begins, ends = (_ids(model.get(f"{name}_token_id")) for name in ("bos", "eos"))
        ends += _ids(generation.get("eos_token_id"))
    with well_formed(f"{folder}: tokenizer_config.json or special_tokens_map.json"):
        names = ((key, _content(settings.get(key) or older.get(key))) for key in _NAMED)
        named = {key: text for key, text in names if text is not None}
        bos, eos = (tokenizer.token_id(named[key]) if key in named else None for key in ("bos_token", "eos_token"))
        template, tool_template = _chat_templates(folder, settings)
    bos = next(iter(begins), None) if bos is None else bos
    if bos is not None and not 0 <= bos < vocab_size:
        raise ModelError(f"{folder}: begin token {bos} is none of the model's {vocab_size}; fetch it again")
    ends += [] if eos is None else [eos]
    before, after = tokenizer.frame
    adds = settings.get("add_bos_token")
    info = TokenizerInfo(
        bos_id=bos,
        add_bos=bos in before[:1] if adds is None else bool(adds),
        eos_ids=tuple(end for end in dict.fromkeys(ends) if 0 <= end < vocab_size),
        chat_template=template,
        tool_template=tool_template,
        template_variables=named,
        end_id=eos if settings.get("add_eos_token") else next(reversed(after), None),
        pooling=folder_pooling(folder),
    )
    return tokenizer.with_info(info)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _content(token: Any) -> str | None:
    """A special token is written as a string, or as an object that holds it."""
    found = token.get("content") if isinstance(token, dict) else token
    if not (found is None or (isinstance(found, str) and encodable(found))):
        raise TypeError(f"a token must be text, got {found!r}")
    return found


def _chat_templates(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """The chat template and, where there is one, that of requests with tools."""
    path, other = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if path.exists():
        return read_text_file(path), read_text_file(other) if other.exists() else None
    given = settings.get("chat_template")
    if given is None and (folder / "chat_template.json").exists():
        given = read_json(folder / "chat_template.json").get("chat_template")
    named = {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else {"default": given}
    found = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
    for each in found:
        if not (each is None or (isinstance(each, str) and encodable(each))):
            raise TypeError(f"chat_template must be text, got {each!r}")
    return found
