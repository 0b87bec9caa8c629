"""A stand-in for Envoy in tests without calls: reports that it is ready, and runs until it is killed."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_PROGRAM = """#!{python}
import socket, sys
admin = sys.argv[sys.argv.index("--admin-address-path") + 1]
server = socket.create_server(("127.0.0.1", 0))
with open(admin, "w") as file:
    file.write("127.0.0.1:%d" % server.getsockname()[1])
print("x" * {says}, flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
    connection.close()
"""


def program(folder: Path, says: int = 0) -> Path:
    """An executable; ``says``: number of bytes that it writes to its log."""
    script = folder / "scripted-envoy"
    script.write_text(_PROGRAM.format(python=sys.executable, says=says), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script
