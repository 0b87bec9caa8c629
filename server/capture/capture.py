"""Writes every request down, for `specdec capture`."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from server.capture.block_hashes import BlockHashes
from server.capture.capture_entry import capture_entry
from server.capture.capture_files import CaptureFiles
from server.telemetry.call_record import CallRecord
from server.telemetry.request_record import RequestRecord
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)


class Capture:
    """A listener that keeps what `capture_entry` says. Requests are written as they end, so not in order of arrival.
    Where it can not write any more, it says so once and costs nothing from then on.

    Raises:
        ConfigError: the folder can not be written.
    """

    def __init__(self, folder: Path, max_bytes: int, *, prompts: bool) -> None:
        self._folder, self._prompts, self._hashes = folder, prompts, BlockHashes()
        try:
            self._files: CaptureFiles | None = CaptureFiles(folder, max_bytes)
        except OSError as error:
            raise ConfigError(f"server.capture_dir: {folder} can not be written ({error.strerror})") from None

    def call_began(self, call: CallRecord) -> None:
        """Calls are not kept."""

    def call_ended(self, call: CallRecord) -> None:
        """Calls are not kept."""

    def request_ended(self, record: RequestRecord) -> None:
        """Write it down; one that only warms the cache too."""
        if self._files is None:
            return
        at_s = time.time() - (time.monotonic() - record.began_s)
        entry = capture_entry(record, at_s, self._hashes, prompts=self._prompts)
        try:
            self._files.write(entry)
        except ValueError as error:
            _LOG.warning("a request was not captured: %s", error)
        except OSError as error:
            _LOG.error("%s: %s; requests are not captured any more", self._folder, error.strerror)
            self._files.close()
            self._files = None

    def close(self) -> None:
        """Nothing is held back."""
        if self._files is not None:
            self._files.close()
            self._files = None
