"""The prompt of /api/generate."""

from __future__ import annotations

from server.completion.fim_templates import TEMPLATES
from server.frontend import Frontend
from server.http.body import Body
from server.http.ollama.images import refuse_images
from specdec.errors import InvalidRequestError

_INT31 = (1 << 31) - 1
_MARKS = tuple((before, behind) for template in TEMPLATES for before in template.prefix for behind in template.suffix)


class PromptFields:
    """The fields that the prompt is made of, as they were sent. ``is_raw``: the prompt goes to the model as it is: the
    body says so, or it is a FIM template that the client has filled in itself, which many do without saying so."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.prompt, self.suffix, self.system = (body.text(name) or "" for name in ("prompt", "suffix", "system"))
        self.context = body.integers("context", 0, _INT31)
        said, template = body.flag("raw"), body.text("template")
        self.is_raw = said or spells_template(self.prompt)
        if said and (self.system or template or self.context):
            body.refuse("raw", "takes the prompt as it is; leave out system, template and context, or raw")
        refuse_images(body)
        body.names["prompt.token_ids"] = "context" if self.context else "prompt"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not self.prompt and (self.is_raw or not self.suffix)

    async def encode(self, frontend: Frontend, max_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids, and those that end what fills a gap, of which as much is shown as leaves room for ``max_tokens``.
        Special tokens that are spelled out are read as such in a raw prompt only; what a template refuses is noted.

        Raises:
            FimNotSupportedError: there is a suffix, and the model can not fill in.
        """
        ends: tuple[int, ...] = ()
        if self.is_empty:
            ids = [0]  # a stand-in: the other fields are checked all the same
        elif self.is_raw:
            ids = await frontend.encode(self.prompt, parse_special=True)
        elif self.suffix:
            packed = await frontend.pack_fim(self.prompt, self.suffix, max_tokens)
            ids, ends = list(packed.ids), packed.ends
        elif frontend.loaded_tokenizer.has_chat_template:
            ids = await self._encode_chat(frontend)
        else:
            ids = await frontend.encode("\n\n".join(filter(None, (self.system, self.prompt))))
        return (*self.context, *ids), ends

    async def _encode_chat(self, frontend: Frontend) -> list[int]:
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            return await frontend.encode_chat(messages)
        except InvalidRequestError as error:
            self._body.refuse("prompt", error.violations[0].description)
            return [0]  # a stand-in: the other fields are checked all the same


def spells_template(text: str) -> bool:
    """Whether a family's marks of what stands before and after a gap are both written out in ``text``."""
    return any(before in text and behind in text for before, behind in _MARKS)
