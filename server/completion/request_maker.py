"""Gaps as requests to the engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from server.auth.principal import Principal
from server.completion.completion_options import CompletionOptions
from server.completion.gap import Gap
from server.completion.gap_rules import gap_rules
from server.completion.packed_prompt import PackedPrompt
from server.completion.prompt_packer import PromptPacker
from server.frontend import Frontend
from specdec.types import Request


class RequestMaker:
    """Makes the prompt, derives the stops. The packer is made once the model is there, and is the front end's ``fim``
    from then on."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    @property
    def packer(self) -> PromptPacker:
        """The served model's.

        Raises:
            EngineDeadError: it is not loaded yet.
        """
        found = self._frontend.fim
        if not isinstance(found, PromptPacker):
            found = PromptPacker(self._frontend.loaded_tokenizer, self._frontend.info.max_context)
            self._frontend.fim = found
        return found

    async def pack(self, gap: Gap, options: CompletionOptions, principal: Principal) -> PackedPrompt:
        """The prompt for ``gap``. Long texts are encoded in a thread, so that others' streams go on.

        Raises:
            FimNotSupportedError: the model can not fill in, and the options ask for it.
            EngineDeadError: the model is not loaded yet.
        """
        packer, owner = self.packer, principal.scoped(options.cache_salt)
        budget = packer.budget(options.max_prompt_tokens, options.stopping.max_tokens or 1)
        heal = options.grammar is None
        if packer.is_quick(gap, owner):
            return packer.pack(gap, options.mode, budget, owner, heal=heal)
        return await asyncio.to_thread(packer.pack, gap, options.mode, budget, owner, heal=heal)

    async def make(
        self, gap: Gap, options: CompletionOptions, principal: Principal, request_id: str, draft: str = ""
    ) -> Request:
        """The request for ``gap``, not checked yet; ``draft`` is a text that the answer is expected to resemble. Raises
        as `pack`."""
        packed, stopping = await self.pack(gap, options, principal), options.stopping
        expected = packed.healed + draft if draft else ""
        limit = stopping.max_tokens
        return Request(
            request_id=request_id,
            prompt_ids=packed.ids,
            sampling=options.sampling,
            stopping=replace(
                stopping,
                max_tokens=limit + packed.n_healed if limit else limit,
                stop_token_ids=tuple(dict.fromkeys((*stopping.stop_token_ids, *packed.ends))),
                rules=gap_rules(gap, options),
            ),
            output=options.output,
            speculation=options.speculation,
            priority=options.priority,
            cache_salt=options.cache_salt,
            prediction_ids=self.packer.encode_text(expected, principal.scoped(options.cache_salt)),
            session=options.session,
            target_tpot_ms=options.target_tpot_ms,
            grammar=options.grammar,
            healed=packed.healed,
        )
