"""What a template puts after what the policy wrote, and how it is found out that it rewrote what came before."""

from typing import NoReturn

import pytest

from rollfarm.chat import ChatTemplate
from rollfarm.chat.messages import ASSISTANT, USER, Call, Message
from rollfarm.chat.suffixes import Rendering, Rewritten, Suffixes
from tests.llm_proxy import models

HELLO, WHY = Message(USER, "Hello?"), Message(USER, "Why?")
NUMBERED = models.TEMPLATE.replace("+ message.role + '\\n'", "+ message.role + ' ' ~ loop.index ~ '\\n'")


def render(chat: ChatTemplate, *messages: Message, prompt: bool = True) -> str:
    return chat.render([message.shown for message in messages], prompt=prompt)


def after(template: str, said: Message) -> str:
    chat = models.chat(template)
    return Suffixes(chat).after(
        said,
        2,
        prompt=Rendering.of(render(chat, HELLO)),
        rendered=render(chat, HELLO, said, WHY),
        recorded=lambda: render(chat, HELLO, said, prompt=False),
    )


@pytest.mark.parametrize(
    "said",
    [
        Message(ASSISTANT, "Yes."),
        Message(ASSISTANT, " Yes.\n"),
        Message(ASSISTANT, ""),
        Message(ASSISTANT, "Yes.", thought="hm"),
        Message(ASSISTANT, "", (Call("1", "weather", '{"a": "<|im_end|>"}'),)),
    ],
)
def test_the_suffix_ends_what_was_said_and_shows_what_follows(said: Message):
    assert after(models.TEMPLATE, said) == "<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_the_suffix_is_the_one_of_its_place_in_the_conversation():
    assert "<|im_start|>user 3\nWhy?" in after(NUMBERED, Message(ASSISTANT, "Yes."))


def test_words_alone_take_one_rendering():
    chat, said = models.chat(), Message(ASSISTANT, "Yes.")

    def recorded() -> NoReturn:
        raise AssertionError("rendered again")

    rendered = render(chat, HELLO, said, WHY)
    suffix = Suffixes(chat).after(
        said, 2, prompt=Rendering.of(render(chat, HELLO)), rendered=rendered, recorded=recorded
    )

    assert rendered == render(chat, HELLO) + "Yes." + suffix


@pytest.mark.parametrize(
    ("template", "how"),
    [
        (models.FORGETFUL, "renders the first 2 messages otherwise once more follow"),
        (models.TEMPLATE + "{{ messages | length }}", "renders what message 2 answered otherwise after it"),
        ("{{ messages | length }}" + models.TEMPLATE, "renders what message 2 answered otherwise after it"),
        (
            models.TEMPLATE.replace("{{- message.content }}", "{{- message.content | replace('Yes', 'No') }}"),
            "changes the words",
        ),
    ],
)
def test_a_template_that_rewrites_says_how(template: str, how: str):
    with pytest.raises(Rewritten, match=how):
        after(template, Message(ASSISTANT, "Yes.", thought="hm"))
