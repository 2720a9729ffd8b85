"""An agent as anybody writes one, on OpenAI's SDK alone: it calls a tool for as long as the model asks for it."""

import json
import os
import secrets
import sys
from typing import Any

import openai

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Works out plus, minus and times.",
            "parameters": {"type": "object", "properties": {"question": {"type": "string"}}},
        },
    }
]


def calculate(question: str) -> str:
    left, operation, right = question.split()
    return str({"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[operation](int(left), int(right)))


def main() -> None:
    client = openai.OpenAI()
    trial = f"Trial {secrets.token_hex(8)}. You have tools."
    messages: list[Any] = [{"role": "system", "content": trial}, {"role": "user", "content": sys.stdin.read()}]
    while True:
        answer: Any = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            print(message.content)
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(arguments["question"])})


if __name__ == "__main__":
    main()
