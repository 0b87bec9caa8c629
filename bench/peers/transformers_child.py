"""Answers prompts with transformers, a line of JSON each; runs in the peer's environment, imports nothing of ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

_LOOKUP_TOKENS = 10  # as transformers' documentation has it
_TAIL_TOKENS = 24  # of the answer, in which a stop string is looked for


class Watch(StoppingCriteria):
    """Notes when the first tokens came, and ends the answer at a stop: asked by transformers after every step."""

    def __init__(self, tokenizer: Any, prompt: int, stop: list[str], stop_ids: list[int]) -> None:
        self._tokenizer, self._prompt, self._stop, self._stop_ids = tokenizer, prompt, stop, set(stop_ids)
        self._seen = prompt
        self.first_s, self.first_tokens = 0.0, 0
        self.end: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        length = input_ids.shape[1]
        if length > self._prompt and not self.first_tokens:
            self.first_s, self.first_tokens = time.perf_counter(), length - self._prompt
        if self.end is None and (self._stop or self._stop_ids):
            ids = input_ids[0].tolist()
            for place in range(self._seen, length):
                if ids[place] in self._stop_ids or self._has_stop(
                    ids[max(self._prompt, place - _TAIL_TOKENS) : place + 1]
                ):
                    self.end = place + 1
                    break
        self._seen = max(self._seen, length)
        return torch.full((input_ids.shape[0],), self.end is not None, dtype=torch.bool, device=input_ids.device)

    def _has_stop(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids) if self._stop else ""
        return any(stop in text for stop in self._stop)


class Answers:
    """The model, and perhaps a smaller one with another vocabulary that drafts for it."""

    def __init__(self, folder: str, draft: str | None) -> None:
        self._tokenizer, self._model = _load(folder)
        self._ends = _ends_of(self._model)
        self._model.generation_config.eos_token_id = None  # only `Watch` ends answers
        self._draft_tokenizer: Any = None
        self._draft: Any = None
        if draft:
            self._draft_tokenizer, self._draft = _load(draft)
        # It refuses to translate between two of the same vocabulary.
        self._same_words = bool(draft) and self._draft_tokenizer.get_vocab() == self._tokenizer.get_vocab()

    def answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        """Times count from now; tokens end with the stop, as servers count them."""
        began = time.perf_counter()
        ids = torch.tensor([ask["ids"]])
        prompt = ids.shape[1]
        ends = [] if ask["fixed"] else [*self._ends, *ask["stop_ids"]]
        watch = Watch(self._tokenizer, prompt, ask["stop"], ends)
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=ask["max_tokens"], do_sample=False,
                stopping_criteria=StoppingCriteriaList([watch]), pad_token_id=0, **self._speculation(ask["mode"]),
            )  # fmt: skip
        ended = time.perf_counter()
        found = out[0, prompt : watch.end].tolist()
        text = self._tokenizer.decode(found, skip_special_tokens=True)
        for stop in ask["stop"]:
            text = text.partition(stop)[0]
        return {
            "tokens": len(found), "first_tokens": watch.first_tokens, "ttft_ms": (watch.first_s - began) * 1e3,
            "e2e_ms": (ended - began) * 1e3, "text": text,
        }  # fmt: skip

    def _speculation(self, mode: str) -> dict[str, Any]:
        if mode == "lookup":
            return {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        if mode == "assistant" and self._same_words:
            return {"assistant_model": self._draft}
        if mode == "assistant":
            return {
                "assistant_model": self._draft, "tokenizer": self._tokenizer,
                "assistant_tokenizer": self._draft_tokenizer,
            }  # fmt: skip
        return {}


def _load(folder: str) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return tokenizer, model.eval()


def _ends_of(model: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    return [] if found is None else list(found) if isinstance(found, list | tuple) else [found]


def main() -> None:
    """Until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    # Libraries print where they like: what we say has an end of its own.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    answers = Answers(args.model, args.draft)
    lines.write('{"ready": true}\n')
    for line in sys.stdin:
        try:
            found = answers.answer(json.loads(line))
        except Exception as error:  # whatever goes wrong with one prompt is that prompt's answer
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        lines.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
