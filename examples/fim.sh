#!/bin/sh
# Fills a gap in a text, in the dialects of llama.cpp and of OpenAI. Needs a model that was trained to, such as
# qwen2.5-coder-1.5b.
#
#     sh examples/fim.sh http://127.0.0.1:8401
set -eu
server=${1:-http://127.0.0.1:8401}

# `prompt` is the cursor's line up to the cursor. Any request may have `speculation`, `session` and the like beside it.
curl -sS --fail-with-body "$server/infill" -H 'content-type: application/json' -d '{
  "input_prefix": "def area(width, height):\n",
  "prompt": "    return ",
  "input_suffix": "\n\n\nprint(area(3, 4))\n",
  "n_predict": 24,
  "temperature": 0,
  "stop": ["\n"],
  "speculation": {"mode": "auto"},
  "response_fields": ["content", "stop_type", "timings/draft_n", "timings/draft_n_accepted"]
}'
echo

curl -sS --fail-with-body "$server/v1/completions" -H 'content-type: application/json' -d '{
  "prompt": "def area(width, height):\n    return ",
  "suffix": "\n\n\nprint(area(3, 4))\n",
  "max_tokens": 24,
  "temperature": 0,
  "stop": ["\n"]
}'
echo
