"""Prompt forms of next-edit models, and predictions from prompts in these forms.

Such a model gets a window of a file and rewrites the whole window, mostly unchanged. So the window's current text,
which the prompt contains, predicts the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.core.types import Request, SpeculationMode
from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class NextEditForm:
    """The texts around the window in one family's prompts."""

    name: str
    cue: str
    """The answer begins after its last occurrence."""
    before: str
    """Precedes the window's current text."""
    after: tuple[str, ...]
    """The first of these ends the window's current text."""
    cursor: str
    """Marks the cursor in the window; not part of its text."""
    contains: str = ""
    """Occurs in every prompt; distinguishes forms that are otherwise equal."""
    path_lines: bool = False
    """``before`` and ``cue`` are followed by the file's path and a line break."""
    in_chat: bool = False
    """The end of a chat message may stand between the cue and the answer."""
    opening: str = ""
    """Begins a prompt that is a message of a conversation."""
    closing: str = ""
    """Ends such a prompt."""
    answer_head: str = ""
    """What the model writes before the window."""
    answer_tail: str = ""
    """What the model writes after the window."""
    stop: str = ""
    """A text that ends the answer and is not part of the window; empty: the model's own end."""
    files: str = ""
    """Precedes the name of each file."""
    models: tuple[str, ...] = ()
    """Parts of the names of models that are trained on it."""


_REGION, _REGION_END = "<|editable_region_start|>\n", "<|editable_region_end|>"

# Of several that fit a prompt, the first one is used.
FORMS = (
    NextEditForm(
        "sweep",
        cue="<|file_sep|>updated/",
        before="<|file_sep|>current/",
        after=("\n<|file_sep|>updated/",),
        cursor="<|cursor|>",
        path_lines=True,
        stop="<|file_sep|>",
        files="<|file_sep|>",
        models=("sweep-next-edit", "sweep_next_edit"),
    ),
    NextEditForm(
        "plain",  # for models that are trained on none of the others: the same blocks without special tokens
        cue="==> updated/",
        before="==> current/",
        after=("\n==> updated/",),
        cursor="",
        path_lines=True,
        stop="\n==> ",
        files="==> ",
    ),
    NextEditForm(
        "zeta-2",
        cue="=======\n<[fim-middle]>",
        before="<<<<<<< CURRENT\n",
        after=("=======\n<[fim-middle]>",),
        cursor="<|user_cursor|>",
        answer_tail=">>>>>>> UPDATED\n",
        stop=">>>>>>> UPDATED",
        files="<filename>",
        models=("zeta-2", "zeta2"),
    ),
    NextEditForm(
        "zeta-2.1",  # numbered marks part the window into blocks; the answer repeats those around what it changes
        cue="|>\n<[fim-middle]>",
        before="<|marker_1|>",
        after=("\n<[fim-middle]>",),
        cursor="<|user_cursor|>",
        contains="<|marker_2|>",
        answer_head="<|marker_1|>",
        stop="<|marker_2|>",
        files="<filename>",
        models=("zeta-2.1", "zeta2.1"),
    ),
    NextEditForm(
        "qwen",  # Qwen's fill-in-the-middle tokens; the text after the window stands before or after the window
        cue="<|fim_middle|>updated\n",
        before="<|fim_middle|>current\n",
        after=("<|fim_suffix|>", "<|fim_middle|>updated\n"),
        cursor="<|user_cursor|>",
    ),
    NextEditForm(
        "instinct",
        cue="### Response:",
        before=_REGION,
        after=(_REGION_END,),
        cursor="<|user_cursor_is_here|>",
        contains="### Context:",
        in_chat=True,
        opening="<|im_start|>user\n",
        closing="<|im_end|>\n<|im_start|>assistant\n",
        models=("instinct",),
    ),
    NextEditForm(
        "zeta",
        cue="### Response:",
        before=_REGION,
        after=(_REGION_END,),
        cursor="<|user_cursor_is_here|>",
        contains="### User Excerpt:",
        in_chat=True,
        answer_head=_REGION,
        answer_tail=_REGION_END,
        stop=_REGION_END,
        models=("zeta",),
    ),
)
_MESSAGE_END_CHARACTERS = 64  # of a chat template between two messages


def expected_answer(prompt: str) -> str:
    """The answer that leaves the window of a next-edit prompt unchanged, less what the prompt contains of it already.
    Empty: the prompt has no next-edit form. Takes linear time."""
    return next((answer for form in FORMS if (answer := _answer(form, prompt))), "")


def _answer(form: NextEditForm, prompt: str) -> str:
    """The expected answer to a prompt in ``form``; empty: the prompt has another form."""
    cue = prompt.rfind(form.cue)
    before = prompt.rfind(form.before, 0, max(cue, 0))
    if before < 0 or form.contains not in prompt:
        return ""
    start, answer_at = before + len(form.before), cue + len(form.cue)
    ends = [end for text in form.after if (end := prompt.find(text, start, answer_at)) >= 0]
    window, written = prompt[start : min(ends, default=start)], prompt[answer_at:]
    if form.path_lines:
        path, _, window = window.partition("\n")
        if written == path:  # the model writes the line break
            window = "\n" + window
        elif not written.startswith(path + "\n"):
            return ""
        written = written.removeprefix(path).removeprefix("\n")
    if not window.strip():
        return ""
    answer = form.answer_head + (window.replace(form.cursor, "") if form.cursor else window) + form.answer_tail
    if answer.startswith(written):
        return answer.removeprefix(written)
    return answer if form.in_chat and len(written) <= _MESSAGE_END_CHARACTERS else ""


def trained_form(model: str) -> NextEditForm | None:
    """The form that a model of this name is trained on: that of the longest part of the name that a form has."""
    named = [(len(part), form) for form in FORMS for part in form.models if part in model.lower()]
    return max(named, key=lambda item: item[0])[1] if named else None


def form_of(model: str, tokenizer: Tokenizer) -> NextEditForm:
    """The form of prompts for ``model``: what it is trained on. Without one, Sweep's if the vocabulary can mark files
    as Sweep does, and ``plain`` otherwise."""
    trained = trained_form(model)
    if trained is not None:
        return trained
    forms = {form.name: form for form in FORMS}
    return forms["plain" if tokenizer.special_id(forms["sweep"].files) is None else "sweep"]


# Tokens at the end of a prompt that are searched for a cue: a path, and the part of the answer that some editors begin
CUE_TOKENS = 256
PROMPT_TOKENS = 4096  # tokens at the end of a prompt with a cue that are searched for the window
ANSWER_CHARACTERS = 8192  # longer answers are not predicted: encoding them would delay other calls
_CUES = tuple({form.cue for form in FORMS})


class WindowReader:
    """Finds the window in prompts of next-edit forms, whichever API they came by."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def predict(self, request: Request) -> Request:
        """``request`` with the window's current text as its prediction. Unchanged if it has a prediction, if it turns
        speculation off, or if its prompt is in no next-edit form."""
        if request.prediction_ids or request.speculation.mode is SpeculationMode.OFF:
            return request
        ids, tokenizer = request.prompt_ids, self._tokenizer
        end = tokenizer.decode(ids[-CUE_TOKENS:], skip_special=False)
        if not any(cue in end for cue in _CUES):
            return request
        answer = expected_answer(tokenizer.decode(ids[-PROMPT_TOKENS:], skip_special=False))
        if not answer or len(answer) > ANSWER_CHARACTERS:
            return request
        expected = tokenizer.encode(answer, add_special=False, parse_special=True)
        return replace(request, prediction_ids=tuple(expected))
