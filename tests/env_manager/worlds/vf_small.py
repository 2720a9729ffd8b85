"""Environments of verifiers 0.1 for tests: a question, a conversation, and tools."""

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]

ROWS = Dataset.from_list([{"question": f"what is {n} plus 1", "answer": str(n + 1)} for n in range(3)])


def right(completion, answer) -> float:
    return float(completion[-1].content.strip() == answer)


class Repeat(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        return [{"role": "user", "content": f"sure about {messages[-1].content}?"}]


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def load_environment(kind: str = "question"):
    rubric = vf.Rubric(funcs=[right])
    if kind == "conversation":
        return Repeat(dataset=ROWS, rubric=rubric, max_turns=2, system_prompt="be brief")
    if kind == "tools":
        return vf.ToolEnv(dataset=ROWS, rubric=rubric, tools=[double], max_turns=4)
    return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
