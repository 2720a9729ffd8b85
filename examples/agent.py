"""An agent as anybody writes one, on OpenAI's SDK: it knows nothing of rollfarm. examples/agent.toml trains it.

The task comes by stdin, and what it prints is its answer. The base URL, the key and the model's name are in the
environment, where the SDK looks for the first two by itself.
"""

import os
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    client, model = OpenAI(), os.environ["OPENAI_MODEL"]
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": sys.stdin.read()}]
    first = client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
    messages.append({"role": "assistant", "content": first})
    messages.append({"role": "user", "content": "are you sure"})
    second = client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
    print(second)


if __name__ == "__main__":
    main()
