from collections.abc import Sequence

import pytest

from env_manager.rendering import Renderer, Span
from rollfarm import tokens
from rollfarm.env import Observation, Step
from rollfarm.v1 import trajectory_pb2
from tests.env_manager.fakes import CHATML, TINY_TEMPLATE, tokenizer

SYSTEM, ENVIRONMENT = trajectory_pb2.AUTHOR_SYSTEM, trajectory_pb2.AUTHOR_ENVIRONMENT


def words(token_ids: bytes, template: str = TINY_TEMPLATE) -> str:
    return tokenizer(template).decode(tokens.unpack_ids(token_ids).tolist())


async def opening(renderer: Renderer, shown: Observation) -> Sequence[Span]:
    return (await renderer.begin(shown).opening()).spans


async def test_an_opening_is_the_templates_own_rendering_with_the_generation_prompt():
    (span,) = await opening(Renderer(tokenizer()), Observation("at 0 0"))

    assert words(span.token_ids) == "<user> at 0 0 <end> <assistant>"
    assert (span.author, span.text) == (ENVIRONMENT, "at 0 0")


async def test_instructions_are_a_turn_of_their_own():
    system, shown = await opening(Renderer(tokenizer()), Observation("at 0 0", system="be brief"))

    assert (system.author, words(system.token_ids)) == (SYSTEM, "<system> be brief <end>")
    assert (shown.author, words(shown.token_ids)) == (ENVIRONMENT, "<user> at 0 0 <end> <assistant>")


async def test_instructions_that_the_template_weaves_into_the_first_message_stay_with_it():
    template = "{% if m %}{% endif %}<user> {% for m in messages %}{{ m.content }} {% endfor %}<end> <assistant> "
    (span,) = await opening(Renderer(tokenizer(template)), Observation("at 0 0", system="be brief"))

    assert words(span.token_ids, template) == "<user> be brief at 0 0 <end> <assistant>"
    assert span.author == ENVIRONMENT


@pytest.mark.parametrize(
    ("template", "eos", "written", "expected"),
    [
        (TINY_TEMPLATE, "<end>", "left", "<end> <user> at 0 1 <end> <assistant>"),
        (TINY_TEMPLATE, "<end>", "left <end>", "<user> at 0 1 <end> <assistant>"),
        (CHATML, "<|im_end|>", "left", "<|im_end|> <|im_start|> user at 0 1 <|im_end|> <|im_start|> assistant"),
        (CHATML, "<|im_end|>", "left <|im_end|>", "<|im_start|> user at 0 1 <|im_end|> <|im_start|> assistant"),
    ],
)
async def test_a_continuation_ends_the_policys_message_unless_the_policy_did(template, eos, written, expected):
    mine = tokenizer(template, eos=eos)
    conversation = Renderer(mine).begin(Observation("at 0 0"))
    await conversation.opening()
    conversation.read(tokens.pack_ids(mine.encode(written)))

    (span,) = (await conversation.answer(Step("at 0 1"))).spans

    assert words(span.token_ids, template) == expected


@pytest.mark.parametrize(("template", "eos"), [(TINY_TEMPLATE, "<end>"), (CHATML, "<|im_end|>")])
async def test_a_conversation_by_suffixes_equals_the_templates_rendering_of_the_whole(template, eos):
    mine = tokenizer(template, eos=eos)
    said = tokens.pack_ids(mine.encode(f"down {eos}"))
    conversation = Renderer(mine).begin(Observation("at 0 0", system="be brief"))
    prompts = [await conversation.opening()]
    for text in ("at 1 0", "at 2 0"):
        conversation.read(said)
        prompts.append(await conversation.answer(Step(text)))

    whole = mine.apply_chat_template(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "at 0 0"},
            {"role": "assistant", "content": "down"},
            {"role": "user", "content": "at 1 0"},
            {"role": "assistant", "content": "down"},
            {"role": "user", "content": "at 2 0"},
        ],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )

    shown = [b"".join(span.token_ids for span in prompt.spans) for prompt in prompts]
    assert said.join(shown) == tokens.pack_ids(whole)


def test_a_generation_stops_at_the_tokenizers_end_and_at_the_templates():
    mine = tokenizer(CHATML, eos="<end>")

    stops = Renderer(mine).stop_token_ids

    assert set(stops) == set(mine.convert_tokens_to_ids(["<end>", "<|im_end|>"]))


def test_the_policys_words_are_decoded_without_special_tokens():
    mine = tokenizer()

    assert Renderer(mine).hear(tokens.pack_ids(mine.encode("left <end>")))[0] == "left"


async def test_template_variables_reach_the_template():
    template = TINY_TEMPLATE + "{{ mood }}"

    (span,) = await opening(Renderer(tokenizer(template), {"mood": "brief"}), Observation("at 0 0"))

    assert words(span.token_ids, template) == "<user> at 0 0 <end> <assistant> brief"
