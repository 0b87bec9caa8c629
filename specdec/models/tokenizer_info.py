"""What a tokenizer's vocabulary does not say: how prompts begin, which tokens end an answer, the chat template."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenizerInfo:
    """``add_bos``: prompts begin with ``bos_id``. ``template_variables`` are the named special tokens that a chat
    template may use (bos_token, eos_token, ...). ``chat_template`` is Jinja source, or None when there is none."""

    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    template_variables: dict[str, str] = field(default_factory=dict)
