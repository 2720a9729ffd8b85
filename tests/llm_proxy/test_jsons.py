"""JSON that one library refuses is read and written by the other, and messages are told apart by what they say."""

import json

import pytest

from llm_proxy.front import jsons
from llm_proxy.front.messages import identity
from rollfarm.chat.messages import ASSISTANT, TOOL, USER, Call, Message

HALF = '{"text": "\\ud83c"}'
HUGE = {"n": 2**70}


@pytest.mark.parametrize("told", [json.loads(HALF), HUGE, {"text": "né 🌧"}])
def test_whatever_a_policy_may_write_is_told(told):
    assert json.loads(jsons.write(told)) == told


def test_half_a_character_is_read_so_that_its_field_can_be_told():
    assert jsons.read(HALF.encode()) == {"text": "\ud83c"}


@pytest.mark.parametrize("value", ['"x"', '"\\ud83c"', "2"])
def test_equal_objects_have_one_form_however_their_keys_are_ordered(value):
    one, other = (json.loads(text) for text in (f'{{"a": 1, "b": {value}}}', f'{{"b": {value}, "a": 1}}'))

    assert jsons.canonical(one) == jsons.canonical(other)


def test_messages_that_say_different_things_have_different_identities():
    said = [
        Message(USER, "x"),
        Message(USER, "x "),
        Message(TOOL, "x"),
        Message(TOOL, "x", call_id="1"),
        Message(TOOL, "1x"),
        Message(TOOL, "", call_id="1x"),
        Message(ASSISTANT, "x"),
        Message(ASSISTANT, "x", calls=(Call("1", "f", "{}"),)),
        Message(ASSISTANT, "x", calls=(Call("1", "f", "[]"),)),
        Message(ASSISTANT, '[["1","f",{}]]x'),
        Message(USER, "\ud83c"),
    ]

    assert len({identity(message) for message in said}) == len(said)


def test_how_arguments_are_spaced_and_ordered_says_nothing():
    one, other = (
        Message(ASSISTANT, calls=(Call("1", "f", arguments),)) for arguments in ('{"a": 1, "b": 2}', '{"b":2,"a":1}')
    )

    assert identity(one) == identity(other)
