"""An edit through OpenAI's client: the old text goes along as the prediction, so that what stays of it is drafted.

python examples/openai_prediction.py --server http://127.0.0.1:8401 old.py "Rename the function add to plus."
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openai import OpenAI, OpenAIError


def main() -> None:
    """Send the edit, and print how much of the prediction was accepted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("change")
    parser.add_argument("--server", default="http://127.0.0.1:8401")
    parser.add_argument("--max-tokens", type=int, default=400)
    given = parser.parse_args()
    try:
        old = given.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"{given.file}: {error}") from None
    client = OpenAI(base_url=f"{given.server}/v1", api_key="none")  # a server with keys wants one here
    try:
        answer = client.chat.completions.create(
            model="",  # whichever is served
            messages=[{"role": "user", "content": f"{given.change} Answer with the whole file.\n\n{old}"}],
            prediction={"type": "content", "content": old},
            temperature=0,
            max_tokens=given.max_tokens,
            extra_body={"speculation": {"mode": "auto"}},
        )
    except OpenAIError as error:
        raise SystemExit(f"{given.server}: {error}") from None
    print(answer.choices[0].message.content)
    usage = answer.usage
    assert usage is not None  # whatever is answered whole has one
    details = usage.completion_tokens_details
    assert details is not None
    print(f"[{usage.completion_tokens} tokens]")
    print(f"[prediction: {details.accepted_prediction_tokens} came out, {details.rejected_prediction_tokens} did not]")
    stats = (answer.model_extra or {})["metrics"]["speculative_decoding"]  # beside what OpenAI has
    print(f"[{stats['num_steps']} steps]")


if __name__ == "__main__":
    main()
