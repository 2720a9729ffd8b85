"""The pure parts of the front door: prompts and records, replies, and text as it comes."""

import tracemalloc

import pytest

from llm_proxy.front import record as records
from llm_proxy.front.messages import Conversation, digests
from llm_proxy.front.prompts import Prompt, Prompter
from llm_proxy.front.record import Cause, Record
from llm_proxy.front.turns import scored, turn_of
from rollfarm import tokens
from rollfarm.chat import ChatTemplate
from rollfarm.chat.messages import ASSISTANT, SYSTEM, TOOL, USER, Call, Message
from rollfarm.chat.replies import Reader, Reading
from rollfarm.chat.text import Detokenizer, StopFinder
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import llm_proxy_pb2, trajectory_pb2
from tests.llm_proxy import models

HELLO = Message(USER, "Hello?")
TOOLS = ({"type": "function", "function": {"name": "weather"}},)


def written(text: str) -> trajectory_pb2.Turn:
    return trajectory_pb2.Turn(author=trajectory_pb2.AUTHOR_POLICY, token_ids=tokens.pack_ids(models.encode(text)))


def shown(prompt: Prompt) -> str:
    return models.decode(tokens.unpack_ids(prompt.token_ids).tolist())


class Played:
    """A session's record, with the prompter that made it."""

    def __init__(self, template: str = models.TEMPLATE) -> None:
        self.prompter = Prompter(models.chat(template))
        self.reading = Reading(models.chat(template))
        self.record = Record()

    def prompt(self, *messages: Message, tools=()) -> Prompt:
        return self.prompter.chat(Conversation(messages, tools), self.record)

    def answer(self, prompt: Prompt, text: str, tools=()) -> tuple[Message, Cause]:
        reader = Reader(self.reading, tools=tools)
        reader.feed(written(text).token_ids)
        reader.finish()
        return reader.message, self.record.add(prompt.answered(written(text), text, reader.message))

    def say(self, *messages: Message, text: str = "Yes.<|im_end|>", tools=()) -> Message:
        return self.answer(self.prompt(*messages, tools=tools), text, tools)[0]


def test_a_continuation_equals_the_templates_rendering_of_the_whole():
    played = Played()
    reply = played.say(Message(SYSTEM, "Be brief."), HELLO)
    messages = (Message(SYSTEM, "Be brief."), HELLO, reply, Message(USER, "Why?"))

    prompt = played.prompt(*messages)

    assert prompt.parent is not None
    whole = models.chat().render([message.shown for message in messages])
    assert shown(prompt) == whole
    assert models.decode(tokens.unpack_ids(prompt.shown[0].token_ids).tolist()).startswith("\n<|im_start|>user\nWhy?")


def test_long_instructions_are_not_kept_once_their_sessions_are_over():
    prompter, size = Prompter(models.chat()), 100_000
    tracemalloc.start()
    try:
        for number in range(10):
            long = Message(SYSTEM, f"{number} ".ljust(size, "x"))
            prompter.chat(Conversation((long, HELLO), ()), Record())
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 2 * size


def test_a_reply_that_was_cut_is_ended_as_the_template_ends_it():
    played = Played()
    reply = played.say(HELLO, text="Yes and")

    prompt = played.prompt(HELLO, reply, Message(USER, "Why?"))

    assert "assistant\nYes and<|im_end|>\n<|im_start|>user\nWhy?" in shown(prompt)


def test_tool_calls_are_matched_however_the_agent_spaces_them():
    played = Played()
    text = '<tool_call>{"arguments":{"b":1,"a":2},"name":"weather"}</tool_call><|im_end|>'
    reply = played.say(HELLO, text=text, tools=TOOLS)
    call = reply.calls[0]
    told_again = Message(ASSISTANT, "", (Call(call.call_id, "weather", '{"a":2, "b":1}'),))

    prompt = played.prompt(HELLO, told_again, Message(TOOL, "sunny", call_id=call.call_id), tools=TOOLS)

    assert text in shown(prompt), "as the policy wrote it"
    assert shown(prompt).endswith("<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("messages", "tools", "said"),
    [
        ((HELLO, Message(ASSISTANT, "No."), HELLO), (), "Message 2 (assistant) is not what branch 1 has there: 'No.'"),
        ((Message(USER, "Hi?"), Message(ASSISTANT, "Yes."), HELLO), (), "Message 1 (user)"),
        (
            (Message(SYSTEM, "x"), HELLO),
            (),
            "Message 1 (system) is not what branch 1 has there: system 'x' instead of user",
        ),
        ((HELLO, Message(ASSISTANT, "Yes."), HELLO), TOOLS, "other tools"),
    ],
)
def test_a_rewritten_history_begins_a_branch_that_says_what_differs(messages, tools, said):
    played = Played()
    played.say(HELLO)

    prompt = played.prompt(*messages, tools=tools)

    assert prompt.parent is None
    assert prompt.origin.cause is Cause.REWRITTEN
    assert said in prompt.origin.detail
    _, cause = played.answer(prompt, "Well.<|im_end|>")
    assert cause is Cause.REWRITTEN
    assert played.record.branches[1].detail == prompt.origin.detail


def test_a_fork_says_where_it_leaves_the_branch():
    played = Played()
    reply = played.say(HELLO)
    played.say(HELLO, reply, Message(USER, "Why?"))

    _, cause = played.answer(played.prompt(HELLO, reply, Message(USER, "How?")), "So.<|im_end|>")

    assert cause is Cause.FORKED
    assert played.record.branches[1].detail == (
        "It shares branch 1 up to its turn 2. "
        "Message 3 (user) is not what branch 1 has there: 'How?' instead of 'Why?'."
    )
    assert [len(branch.replies) for branch in played.record.branches] == [2, 2]


def test_the_record_counts_the_tokens_of_every_branch():
    played = Played()
    reply = played.say(HELLO)
    for text in ("Why?", "How?"):
        played.say(HELLO, reply, Message(USER, text))

    record = played.record.to_proto("s")

    assert played.record.token_count == sum(
        len(turn.token_ids) // 4 for branch in record.branches for turn in branch.turns
    )


def test_two_of_the_likeliest_tokens_take_the_room_of_one():
    played = Played()
    turn = written("Yes.")
    made = tokens.token_count(turn.token_ids)
    turn.top_logprobs.width = 20
    turn.top_logprobs.token_ids = tokens.pack_ids([1] * 20 * made)
    prompt = played.prompt(HELLO)

    played.record.add(prompt.answered(turn, "Yes."))

    assert played.record.token_count == prompt.token_count + made + 10 * made


CALLED = Message(ASSISTANT, calls=(Call("1", "weather", '{"a": 1}'),), thought="hm")
RESPACED = Message(ASSISTANT, calls=(Call("1", "weather", '{"a":1}'),))
LONG = (HELLO, CALLED, Message(TOOL, "Rain.", call_id="1"))


@pytest.mark.parametrize("tools", [(), TOOLS])
@pytest.mark.parametrize(
    "messages",
    [
        LONG,
        (*LONG, Message(ASSISTANT, "Yes."), Message(USER, "Why?")),
        (*LONG, Message(ASSISTANT, "No."), Message(USER, "Why?")),
        (HELLO, RESPACED, *LONG[2:], Message(ASSISTANT, "Yes."), Message(USER, "Why?")),
        (HELLO, Message(ASSISTANT), *LONG[2:], Message(ASSISTANT, "Yes."), Message(USER, "Why?")),
        (Message(USER, "Hi"), *LONG[1:]),
        (HELLO,),
    ],
)
def test_a_history_has_one_digest_however_much_of_it_was_recorded(messages, tools):
    played = Played()
    played.say(*LONG, tools=TOOLS)
    asked = Conversation(messages, tools)

    assert played.record.digests(asked) == digests(asked.start, messages)


def test_what_was_recorded_is_not_digested_again(monkeypatch):
    played, said = Played(), [HELLO]
    digested: list[int] = []

    def counted(start, messages):
        digested.append(len(messages))
        return digests(start, messages)

    for _ in range(5):
        said += [played.say(*said), Message(USER, "Why?")]
    monkeypatch.setattr(records, "digests", counted)

    played.prompt(*said)

    assert digested == [1, 1], "the first message and the new one, of 11"


def test_a_template_that_leaves_thoughts_out_at_once_is_detected():
    template = models.TEMPLATE.replace("{%- if message.reasoning_content %}", "{%- if false %}")
    played = Played(template)
    reply = played.say(HELLO, text="<think>hm</think>Yes.<|im_end|>")

    prompt = played.prompt(HELLO, reply, Message(USER, "Why?"))

    assert prompt.origin.cause is Cause.TEMPLATE
    assert "leaves out or changes the thoughts of message 2" in prompt.origin.detail


def test_a_long_text_is_never_cut_whatever_the_tokenizers_file_says():
    own = models.tokenizer(models.TEMPLATE + "  ")
    own.backend_tokenizer.enable_truncation(4)

    assert ChatTemplate(own).encode("one two three four") == models.encode("one two three four")


def test_a_template_that_cannot_render_says_so():
    with pytest.raises(InvalidArgument, match="Unexpected role wizard"):
        Played().prompt(Message("wizard", "x"))


def test_a_template_that_begins_the_thought_is_read_from_there():
    template = models.TEMPLATE.replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}\n"
    )
    assert template != models.TEMPLATE
    reader = Reader(Reading(models.chat(template)))

    reader.feed(written("hm\n</think>\n\nYes.<|im_end|>").token_ids)
    reader.finish()

    assert (reader.message.thought, reader.message.content) == ("hm", "Yes.")


@pytest.mark.parametrize("text", [" One\n\n two \n", "", "<think>hm</think> Yes", "<tool_call>{}</tool_call>"])
def test_what_a_template_without_marks_has_the_model_write_is_text_as_it_is(text):
    reader = Reader(Reading(models.chat("{% for message in messages %}{{ message.content + '\n' }}{% endfor %}")))

    reader.feed(written(text).token_ids)
    reader.finish()

    assert (reader.message.content, reader.message.thought, reader.message.calls) == (text, "", ())


def test_a_tokenizers_own_response_template_is_used_and_what_it_cannot_parse_stays_text():
    own = models.tokenizer(models.TEMPLATE + " ")
    own.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"content": "text"},
            "thinking": {"open": "[", "close": "]"},
            "tool_calls": {"open": "CALL", "close": "END", "content": "json", "repeats": True},
        },
    }
    reading = Reading(ChatTemplate(own))
    told = []
    for text in ('[hm] Look. CALL{"name": "weather", "arguments": {"a": 1}}END', "Look. CALL{bad}END so"):
        reader = Reader(reading, tools=TOOLS)
        for token in models.encode(text):
            reader.feed(tokens.pack_ids([token]))
        reader.finish()
        told.append(reader.message)

    assert (told[0].thought, told[0].content, told[0].thought_field) == ("hm", "Look.", "thinking")
    assert [(call.name, call.arguments) for call in told[0].calls] == [("weather", '{"a": 1}')]
    assert (told[1].content, told[1].calls) == ("Look. CALL{bad}END so", ())


@pytest.mark.parametrize("stops", [[], ["TOP"]])
@pytest.mark.parametrize("text", ["<think>hm</think>Né 🌧", "x STOP y", "x ST"])
def test_what_was_read_of_a_reply_is_the_text_of_its_tokens(text, stops):
    reading = Reading(models.chat())
    reader = Reader(reading, stops=stops)
    ids = models.encode(f"{text}<|im_end|>")

    for token in ids:
        reader.feed(tokens.pack_ids([token]))
    reader.finish()

    assert reader.text == reading.decode(ids[: reader.token_count])


@pytest.mark.parametrize("text", ["né 🌧🌧 ok", "日本語", "a\n\n b", "é"])
def test_text_that_comes_token_by_token_is_the_text_of_the_whole(text):
    detokenizer = Detokenizer(models.decode)

    pieces = [detokenizer.feed([token]) for token in models.encode(text)]

    assert "".join(pieces) + detokenizer.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_that_is_never_completed_is_told_at_the_end():
    detokenizer = Detokenizer(models.decode)

    assert detokenizer.feed(models.encode("🌧")[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_of_characters_that_are_never_completed_few_are_held_back():
    broken = models.encode("🌧")[-1:]
    ids = [*broken * 100, *models.encode("🌧 é"), *broken * 30, *models.encode("🌧")]
    detokenizer = Detokenizer(models.decode)

    told = [detokenizer.feed([token]) for token in ids]

    assert len("".join(told[:100])) > 80
    assert "".join(told) + detokenizer.flush() == models.decode(ids)


def test_a_stop_string_is_found_across_pieces_and_never_told():
    finder = StopFinder(["STOP", "TO"])

    told = [finder.feed(piece) for piece in ("one S", "T", "x S", "TOP two")]

    assert (told, finder.found) == (["one ", "", "STx ", ""], "STOP")
    assert finder.feed("more") == finder.flush() == ""


def test_what_only_looks_like_a_stop_string_is_told_at_the_end():
    finder = StopFinder(["STOP"])

    assert (finder.feed("one ST"), finder.flush(), finder.found) == ("one ", "ST", "")


def test_a_turn_that_is_cut_keeps_its_arrays_together():
    spans = [
        trajectory_pb2.VersionSpan(policy_version=1, token_count=2),
        trajectory_pb2.VersionSpan(policy_version=2, token_count=2),
    ]
    top = trajectory_pb2.TopLogprobs(
        width=2, token_ids=tokens.pack_ids(range(8)), logprobs=tokens.pack_logprobs([-1.0] * 8)
    )
    result = llm_proxy_pb2.GenerationResult(
        token_ids=tokens.pack_ids([5, 6, 7, 8]),
        logprobs=tokens.pack_logprobs([-0.5, -1, -1.5, -2]),
        version_spans=spans,
        top_logprobs=top,
    )

    turn = turn_of(result, 3)

    assert tokens.versions_of(turn.version_spans).tolist() == [1, 1, 2]
    assert [(one.token, one.logprob, one.top) for one in scored(turn, 1)] == [
        (5, -0.5, [(0, -1.0)]),
        (6, -1.0, [(2, -1.0)]),
        (7, -1.5, [(4, -1.0)]),
    ]
