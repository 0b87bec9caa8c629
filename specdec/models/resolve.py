"""Resolves a model's name to its checkpoint: a folder, a GGUF file, a catalogue entry, a hub id or a random shape."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from specdec.config import EngineConfig
from specdec.errors import ModelError
from specdec.models.catalogue import CATALOGUE, RANDOM_PREFIX, suggestion
from specdec.models.checkpoint import Checkpoint, FusedSource, TensorSource, by_parts, fingerprint_files, read_json
from specdec.models.fetch import Fetcher, fetch_from_hub
from specdec.models.gguf import GGUFFile, GGUFSource
from specdec.models.gguf_tokenizer import TokenizerCache, convert_gguf_tokenizer
from specdec.models.hf import HFSource, parse_quantized_config, weight_files
from specdec.models.hf_tokenizer import load_hf_tokenizer
from specdec.models.progress import Progress, silent
from specdec.models.tokenizer import Tokenizer


class HFCheckpoint(Checkpoint):
    """A folder ``path`` with config.json, safetensors and tokenizer.json.

    place: see `Checkpoint`; given where ``path`` changes with the version.
    """

    def __init__(self, path: Path, name: str | None = None, place: Path | None = None) -> None:
        self.path, self.place = path, place or path
        self.name = name or path.resolve().name

    def fingerprint(self) -> str:
        """SHA-256 over the configuration and every weight file."""
        read_json(self.path / "config.json")  # first: a folder without it is most often no model at all
        return fingerprint_files([self.path / "config.json", *weight_files(self.path)])

    def open(self) -> TensorSource:
        """The tensors; for a quantised folder, those of a `QuantizedSource`."""
        source = HFSource(self.path)
        source.name = self.name  # the folder of a hub's model is named by its commit
        quantized = read_json(self.path / "config.json").get("quantization_config")
        if quantized is None:
            return by_parts(source)
        from specdec.models.quantized import QuantizedSource  # not at the top, like `random_model`: both import torch

        return by_parts(QuantizedSource(source, parse_quantized_config(quantized, self.name)))

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        """The folder's own tokenizer, which needs no conversion."""
        return load_hf_tokenizer(self.path, HFSource(self.path, "numpy").config.vocab_size)


class GGUFCheckpoint(Checkpoint):
    """The file at ``path``. sha256: its digest if that is known already, as for catalogue models."""

    def __init__(self, path: Path, name: str | None = None, sha256: str | None = None) -> None:
        self.path = self.place = path
        self.name = name or path.stem
        self._sha256 = sha256

    @cached_property
    def _file(self) -> GGUFFile:
        return GGUFFile(self.path)  # opened only on a cache miss: parsing a large header takes a while

    def fingerprint(self) -> str:
        """The file's digest if known, else SHA-256 over its header, size and time."""
        return self._sha256 or fingerprint_files([self.path])

    def open(self) -> TensorSource:
        return by_parts(GGUFSource(self._file))

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        """The file's vocabulary, converted once and then read from the cache."""
        cache = TokenizerCache(cache_dir / "tokenizers")
        found = cache.read(self.fingerprint())
        if found is None:
            self.open()  # so that an unsupported architecture is reported first
            found = convert_gguf_tokenizer(self._file)
            cache.write(self.fingerprint(), *found)
        try:
            return Tokenizer.shared(*found)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None


class AdapterCheckpoint(Checkpoint):
    """A LoRA adapter in ``folder``, as PEFT saves it, added to its ``base``."""

    def __init__(self, folder: Checkpoint, base: Checkpoint) -> None:
        self.name, self.path, self.place = folder.name, folder.path, folder.place
        self._base = base

    def fingerprint(self) -> str:
        """SHA-256 over the base's and the adapter's files."""
        with _of_base(self.path):
            base = self._base.fingerprint()
        own = fingerprint_files([self.path / "adapter_config.json", *weight_files(self.path)])
        return hashlib.sha256(f"{base}{own}".encode()).hexdigest()

    def open(self) -> TensorSource:
        from specdec.models.adapter import AdapterSource  # not at the top, like `random_model`: it imports torch

        with _of_base(self.path):
            base = self._base.open()
        stored = base.inner if isinstance(base, FusedSource) else base  # an adapter changes matrices as they are stored
        return by_parts(AdapterSource(stored, self.path, self.name))

    def tokenizer(self, cache_dir: Path) -> Tokenizer:
        """The adapter's, completed by the base's; the base's where the adapter's folder holds none."""
        with _of_base(self.path):
            base = self._base.tokenizer(cache_dir)
        if not (self.path / "tokenizer.json").exists():
            return base
        return load_hf_tokenizer(self.path, base.vocab_size).completed_by(base)


@contextmanager
def _of_base(adapter: Path) -> Iterator[None]:
    """Adds to an error of the base of ``adapter`` where the base is named."""
    try:
        yield
    except ModelError as error:
        said = f"base_model_name_or_path in {adapter}/adapter_config.json names it"
        raise type(error)(f"{error}; {said}, and may name another folder, .gguf file or known model") from None


_ADAPTER_WEIGHTS = "adapter_model.safetensors"  # PEFT's name


def adapter_base(folder: Path) -> str | None:
    """The base model that the adapter in ``folder`` names; None if there is no adapter, or a whole model beside it.

    Raises:
        ModelError: the adapter names none, or its weights are not in the one file that PEFT writes.
    """
    path = folder / "adapter_config.json"
    if not os.path.exists(path):
        return None
    weights = {file.name for file in folder.glob("*.safetensors")}
    if not weights <= {_ADAPTER_WEIGHTS} and (folder / "config.json").exists():
        return None
    if weights != {_ADAPTER_WEIGHTS}:
        found = ", ".join(sorted(weights - {_ADAPTER_WEIGHTS})) or "no weights"
        raise ModelError(
            f"{folder}: an adapter needs {_ADAPTER_WEIGHTS} and nothing beside it, found {found}; save it with PEFT"
        )
    base = read_json(path).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path}: base_model_name_or_path must name the adapter's base model, got {base!r}")
    return base


def named_draft(draft: str, target: str) -> str:
    """``draft``; for `auto` the draft model that suits ``target`` best, or the base of the adapter in that folder.

    Raises:
        ModelError: that model is not in the catalogue, or no draft is known for it.
    """
    if draft != "auto":
        return draft
    model = adapter_base(Path(os.path.expanduser(target))) or target
    entry = CATALOGUE.get(model)
    if entry and entry.drafts:
        return entry.drafts[0]
    near = "" if entry else suggestion(model)
    raise ModelError(f"engine.draft: no draft is known for {model}; name a model, or leave it out{near}")


def with_named_draft(config: EngineConfig) -> EngineConfig:
    """``config`` with the name of its draft model; raises as `named_draft`."""
    draft = None if config.draft is None else named_draft(config.draft, config.target)
    return config.model_copy(update={"draft": draft})


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve(ref: str, cache_dir: Path, progress: Progress) -> Checkpoint:
    """The checkpoint ``ref``: an existing folder or file first, then "random:SHAPE", a catalogue name, or a hub id.

    Raises:
        ModelError: there is none, or it cannot be fetched.
    """
    found = _find(ref, cache_dir, progress)
    base = adapter_base(found.path) if isinstance(found, HFCheckpoint) else None
    if base is None:
        return found
    with _of_base(found.path):
        model = _find(base, cache_dir, progress)
        if isinstance(model, HFCheckpoint) and adapter_base(model.path) is not None:
            raise ModelError(f"{base}: is an adapter too; merge it into its base (peft: merge_and_unload)")
    return AdapterCheckpoint(found, model)


def _find(ref: str, cache_dir: Path, progress: Progress) -> Checkpoint:
    """As `resolve`, but an adapter's folder is taken for a model's."""
    path = os.path.expanduser(ref)  # not pathlib's, which raises where there is no such user
    if os.path.isdir(path):
        return _folder(Path(path))
    if os.path.isfile(path):
        return GGUFCheckpoint(Path(path))
    if ref.startswith(RANDOM_PREFIX):
        from specdec.models.random_model import RandomCheckpoint

        return RandomCheckpoint(ref)
    if ref in CATALOGUE:
        entry = CATALOGUE[ref]
        fetched = Fetcher(cache_dir / "models").fetch(entry, progress)
        return GGUFCheckpoint(fetched, name=ref, sha256=entry.sha256)
    if ref.endswith(".gguf") or ref.startswith((".", "/", "~")):
        raise ModelError(f"{ref}: no such file or folder")
    if _HUB_ID.fullmatch(ref):
        return _from_hub(ref, cache_dir / "hub")
    raise ModelError(f"{ref}: no such file, folder or catalogue model{suggestion(ref)}")


def load_tokenizer(ref: str, cache_dir: Path, progress: Progress | None = None) -> Tokenizer:
    """The tokenizer of the model ``ref``, in any form that `specdec.models.load.load_model` takes.

    Raises:
        ModelError: not found, truncated, corrupt, or without tokenizer.
        UnsupportedModelError: the architecture is not supported.
    """
    return resolve(ref, cache_dir, progress or silent).tokenizer(cache_dir)


def is_here(ref: str, cache_dir: Path) -> bool:
    """Whether `resolve` fetches nothing for ``ref``, which may name nothing; False for a hub id, which is not looked
    up."""
    path = os.path.expanduser(ref)
    with suppress(ModelError):  # which `resolve` reports
        ref = adapter_base(Path(path)) or ref
    if os.path.exists(os.path.expanduser(ref)):
        return True
    if ref in CATALOGUE:
        return Fetcher(cache_dir / "models").is_complete(CATALOGUE[ref])
    return ref.endswith(".gguf") or not _HUB_ID.fullmatch(ref)


def _from_hub(repository: str, pins: Path) -> Checkpoint:
    """The checkpoint of a repository on the hub, whose folder changes with the commit that `fetch_from_hub` pins."""
    folder = fetch_from_hub(repository, pins)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{repository}: holds no safetensors; if it holds .gguf files, download one and give the path of that file"
        )
    return HFCheckpoint(folder, repository.rpartition("/")[2], pins / repository)


def _folder(path: Path) -> Checkpoint:
    """A model folder, or one with a single .gguf file; an image encoder's and a config.json may lie beside it."""
    found = sorted(path.glob("*.gguf"))
    files = [file for file in found if "mmproj" not in file.name.lower()] or found
    if (path / "config.json").exists() and (not files or any(path.glob("*.safetensors"))):
        return HFCheckpoint(path)
    if len(files) > 1:
        raise ModelError(f"{path}: holds {len(files)} .gguf files; name one, such as {files[0]}")
    if not files and (snapshots := sorted(path.glob("snapshots/*"))):  # which the hub's library made
        raise ModelError(f"{path}: is a folder of the hub's cache; name a snapshot of it, such as {snapshots[0]}")
    return GGUFCheckpoint(files[0]) if files else HFCheckpoint(path)
