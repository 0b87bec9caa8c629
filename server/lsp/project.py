"""The folders an editor has open, and what its documents are called in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from lsprotocol import types


class Project:
    """Documents are known by their paths in the project: prompts read better, and nobody learns where a user keeps
    things."""

    def __init__(self, folders: Iterable[types.WorkspaceFolder] = ()) -> None:
        self._folders = list(folders)

    def change(self, added: Sequence[types.WorkspaceFolder], removed: Sequence[types.WorkspaceFolder]) -> None:
        """Folders come and go."""
        gone = {folder.uri for folder in removed}
        self._folders = [folder for folder in self._folders if folder.uri not in gone] + list(added)

    def name_of(self, uri: str) -> str:
        """A document's path in its folder, behind the folder's name where several are open; its file's name where it
        is in none."""
        folder = self._folder_of(uri)
        if folder is None:
            return unquote(uri.rstrip("/").rpartition("/")[2]) or uri
        path = unquote(uri[len(folder.uri.rstrip("/")) + 1 :])
        return f"{folder.name}/{path}" if len(self._folders) > 1 else path

    def repository_of(self, uri: str) -> str:
        """The name of a document's folder; empty where it is in none."""
        folder = self._folder_of(uri)
        return "" if folder is None else folder.name

    def _folder_of(self, uri: str) -> types.WorkspaceFolder | None:
        inside = [folder for folder in self._folders if uri.startswith(folder.uri.rstrip("/") + "/")]
        return max(inside, key=lambda folder: len(folder.uri), default=None)


def folders_of(params: types.InitializeParams) -> list[types.WorkspaceFolder]:
    """The folders an editor begins with, in whichever way it tells them."""
    if params.workspace_folders:
        return list(params.workspace_folders)
    if params.root_uri:
        return [types.WorkspaceFolder(params.root_uri, unquote(params.root_uri.rstrip("/").rpartition("/")[2]))]
    return []
