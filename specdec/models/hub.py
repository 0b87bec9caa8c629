"""Gets models from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import ModelError

_WANTED = ["*.json", "*.safetensors", "*.jinja"]


def fetch_from_hub(repository: str) -> Path:
    """Folder of ``repository`` (`owner/name`) in the hub library's cache, downloaded when it is not there.

    Raises:
        ModelError: the hub can not be reached, or has no such repository for this user.
    """
    from huggingface_hub import snapshot_download  # not at the top: it takes most of a second

    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED))
    except Exception as error:  # the library raises its HTTP client's errors too
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(
            f"{repository}: can not be had from the hub ({reason}); check the name and the network, or give a model "
            "folder, a .gguf file or a catalogue name"
        ) from None
