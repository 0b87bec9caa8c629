"""A server with the part of OpenAI's API that peers need: ``python fake_server.py --port N ...``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers each prompt with ``max_tokens`` words; the command line says which request fails and how."""

    args: argparse.Namespace
    asked = 0

    def do_GET(self) -> None:
        self.send_response(503 if self.args.never_ready else 200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.asked += 1
        with open(self.args.log, "a", encoding="utf-8") as log:
            log.write(json.dumps({"name": self.args.name, "pid": os.getpid(), **body}) + "\n")
        if Handler.asked == self.args.refuse_at:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"that prompt is too long")
            return
        self.send_response(200)
        self.end_headers()
        if Handler.asked == self.args.hang_at:
            time.sleep(600)
        for number in range(body["max_tokens"]):
            if Handler.asked == self.args.die_at and number == 1:
                print("error: out of luck", flush=True)
                os._exit(1)
            self.event({"choices": [{"text": f"{self.args.word} "}]})
        self.event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *words: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--word", default="word")
    for flag in ("--refuse-at", "--hang-at", "--die-at"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="ignores SIGTERM, and has a child that does")
    args = Handler.args = parser.parse_args()
    if args.fail:
        sys.exit("error: no such model")
    if args.deaf:
        import signal
        import subprocess

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        found = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
        with open(args.log, "a", encoding="utf-8") as log:
            log.write(json.dumps({"name": "child", "pid": found.pid}) + "\n")
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
