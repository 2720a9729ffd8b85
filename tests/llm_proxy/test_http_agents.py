"""Agents as they are, on the real SDKs: what they are answered is recorded token by token."""

import json
from typing import Any

from llm_proxy.front.metrics import NEW_HISTORIES
from rollfarm import tokens
from tests.llm_proxy import models
from tests.llm_proxy.fronts import MODEL, POLICY, assert_exact, branch_ids, scripted

OPENAI_TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Looks out of the window.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
ANTHROPIC_TOOLS: Any = [
    {
        "name": "weather",
        "description": "Looks out of the window.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]


def call(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather","arguments":{{"city":"{city}"}}}}\n</tool_call><|im_end|>'


def two_calls_and_an_answer(prompt: str) -> str:
    """Asks for two cities in turn, unevenly spaced as models do, and then tells."""
    results = prompt.count("<tool_response>")
    if results == 0:
        return "<think>\nWhere?\n</think>\n\nLet me look.\n" + call("Paris")
    return call("Köln 🌧") if results == 1 else "It is sunny in Paris, and é.<|im_end|>"


async def openai_agent(client: Any, question: str) -> list[Any]:
    """Goes on until no tool is called. Returns its messages."""
    messages: list[Any] = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": question}]
    while True:
        answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=OPENAI_TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if answer.choices[0].finish_reason != "tool_calls":
            return messages
        for asked in message.tool_calls:
            city = json.loads(asked.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": f"sunny in {city}"})


async def anthropic_agent(client: Any, question: str) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = await client.messages.create(
            model=MODEL, max_tokens=100, system="You are helpful.", messages=messages, tools=ANTHROPIC_TOOLS
        )
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return messages
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"sunny in {block.input['city']}"}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


async def test_an_openai_agent_that_calls_tools_is_recorded_token_by_token():
    async with scripted(two_calls_and_an_answer) as (world, script):
        messages = await openai_agent(world.openai(), "How is the weather?")

        record = await world.record()
        assert messages[-1].content == "It is sunny in Paris, and é."
        assert messages[2].content == "Let me look."
        assert json.loads(messages[4].tool_calls[0].function.arguments) == {"city": "Köln 🌧"}
        (branch,) = record.branches
        assert_exact(record, script)
        assert branch_ids(branch) == script.prompts[-1] + script.answer(script.prompts[-1])
        assert [turn.author == POLICY for turn in branch.turns] == [False, False, True, False, True, False, True]
        assert branch.origin_detail == ""
        assert record.request_count == 3
        assert branch.turn_texts[0] == "You are helpful."
        assert branch.turn_texts[3] == "sunny in Paris"
        assert models.decode(branch_ids(branch)).endswith("and é.<|im_end|>")


async def test_an_anthropic_agent_that_calls_tools_is_recorded_token_by_token():
    async with scripted(two_calls_and_an_answer) as (world, script):
        messages = await anthropic_agent(world.anthropic(), "How is the weather?")

        record = await world.record()
        assert messages[-1]["content"][0].text == "It is sunny in Paris, and é."
        assert [block.type for block in messages[1]["content"]] == ["thinking", "text", "tool_use"]
        assert messages[1]["content"][0].thinking == "Where?"
        (branch,) = record.branches
        assert_exact(record, script)
        assert branch_ids(branch) == script.prompts[-1] + script.answer(script.prompts[-1])


async def test_both_apis_show_the_model_the_same():
    async with scripted(two_calls_and_an_answer) as (world, script):
        await openai_agent(world.openai(), "How is the weather?")
        openai_branch = (await world.branches())[0]
        await world.open("another")
        await anthropic_agent(world.anthropic(), "How is the weather?")

        (anthropic_branch,) = (await world.record("another")).branches
        assert branch_ids(anthropic_branch) == openai_branch
        assert len(script.prompts) == 3


async def test_the_sdks_own_stream_and_tool_helpers_work():
    async with scripted(two_calls_and_an_answer) as (world, script):
        asked: list[Any] = [{"role": "user", "content": "How is the weather?"}]
        async with world.anthropic().messages.stream(
            model=MODEL, max_tokens=100, messages=asked, tools=ANTHROPIC_TOOLS
        ) as stream:
            told: Any = await stream.get_final_message()
        assert [block.type for block in told.content] == ["thinking", "text", "tool_use"]
        assert told.content[2].input == {"city": "Paris"}
        assert told.stop_reason == "tool_use"
        async with world.openai().chat.completions.stream(model=MODEL, messages=asked, tools=OPENAI_TOOLS) as stream:
            completion: Any = await stream.get_final_completion()
        assert completion.choices[0].message.content == "Let me look."
        assert completion.choices[0].message.tool_calls[0].function.name == "weather"
        assert completion.choices[0].finish_reason == "tool_calls"
        assert_exact(await world.record(), script)


async def test_a_template_that_rewrites_history_is_detected():
    rewritten = NEW_HISTORIES.labels("template")._value.get()
    async with scripted(lambda prompt: "<think>\nhm\n</think>\n\nYes.<|im_end|>", template=models.FORGETFUL) as (
        world,
        script,
    ):
        client = world.openai()
        messages: list[Any] = [{"role": "user", "content": "Is it so?"}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Really?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)

        record = await world.record()
        first, second = record.branches
        assert "template renders the first 2 messages otherwise once more follow" in second.origin_detail
        assert "<think>" in models.decode(branch_ids(first))
        assert models.decode(script.prompts[1]).count("<think>") == 0
        assert_exact(record, script)
    assert NEW_HISTORIES.labels("template")._value.get() == rewritten + 1


async def test_the_same_conversation_is_one_branch_where_the_template_keeps_thoughts():
    async with scripted(lambda prompt: "<think>\nhm\n</think>\n\nYes.<|im_end|>") as (world, script):
        client = world.openai()
        messages: list[Any] = [{"role": "user", "content": "Is it so?"}]
        answer: Any = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Really?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)

        assert answer.choices[0].message.reasoning_content == "hm"
        assert len(await world.branches()) == 1
        assert models.decode(script.prompts[1]).count("<think>") == 1, "the agent left its thoughts out, the record not"
        assert_exact(await world.record(), script)


async def test_an_agent_that_rewrites_its_history_begins_a_branch_that_says_where():
    async with scripted(lambda prompt: "Yes.<|im_end|>") as (world, script):
        client = world.openai()
        messages: list[Any] = [{"role": "user", "content": "Is the first thing so?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)

        first, second = (await world.record()).branches
        assert second.origin_detail == "Message 2 (assistant) is not what branch 1 has there: 'No.' instead of 'Yes.'."
        assert len(first.turns) == 2
        assert_exact(await world.record(), script)


async def test_parallel_choices_are_branches_that_share_what_was_shown():
    async with scripted(lambda prompt: f"Yes {prompt.count('Why')}.<|im_end|>") as (world, script):
        client = world.openai()
        messages: list[Any] = [{"role": "user", "content": "Is it so?"}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages, n=3)
        messages += [{"role": "assistant", "content": answer.choices[1].message.content}]
        messages += [{"role": "user", "content": "Why?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        await client.chat.completions.create(model=MODEL, messages=messages)

        record = await world.record()
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [len(branch.turns) for branch in record.branches] == [2, 2, 4, 4]
        assert [branch.shared_turn_count for branch in record.branches] == [0, 0, 0, 2]
        assert record.request_count == 3
        assert record.branches[1].origin_detail == "Branch 1 was shown the same, and it is another reply to it."
        assert record.branches[3].origin_detail.startswith("It shares branch 3 up to its turn 2.")
        assert_exact(record, script)


async def test_what_the_policy_wrote_is_never_tokenised_again():
    def write(prompt: str) -> str:
        return "Let me look.<|im_end|>"

    async with scripted(write) as (world, script):
        spelled = [models.encode(character)[0] for character in "Let me look."] + models.encode("<|im_end|>")
        script.say(spelled)
        client = world.openai()
        messages: list[Any] = [{"role": "user", "content": "So?"}]
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
        await client.chat.completions.create(model=MODEL, messages=messages)

        assert len(models.encode("Let me look.")) < len(spelled) - 1
        assert script.prompts[1][len(script.prompts[0]) :][: len(spelled)] == spelled
        (branch,) = (await world.record()).branches
        assert tokens.unpack_ids(branch.turns[1].token_ids).tolist() == spelled
