"""A script that answers in lines of JSON, as `PipePeer` has it; the first ask's first token id says what goes wrong."""

from __future__ import annotations

import json
import sys
import time

print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    ask = json.loads(line)
    match ask["ids"][0]:
        case 666:
            print("error: out of luck", file=sys.stderr)
            sys.exit(1)
        case 667:
            print("nonsense", flush=True)
        case 668:
            print(json.dumps({"error": "too long"}), flush=True)
        case 669:
            print(json.dumps({"tokens": 3}), flush=True)
        case 670:
            time.sleep(600)
        case _:
            answer = {"tokens": ask["max_tokens"], "first_tokens": 2, "ttft_ms": 5.0, "e2e_ms": 25.0}
            print(json.dumps({**answer, "text": f"{ask['mode']} {ask['stop']} {ask['fixed']}"}), flush=True)
