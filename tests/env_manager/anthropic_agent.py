"""An agent on Anthropic's SDK alone: it asks, doubts, and prints the second answer."""

import os
import sys
from typing import Any

import anthropic


def main() -> None:
    client, model = anthropic.Anthropic(), os.environ["ANTHROPIC_MODEL"]
    messages: list[Any] = [{"role": "user", "content": sys.stdin.read()}]
    text = ""
    for _ in range(2):
        answer = client.messages.create(model=model, max_tokens=100, messages=messages)
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "Are you sure?"}]
        text = "".join(block.text for block in answer.content if block.type == "text")
    print(text)


if __name__ == "__main__":
    main()
