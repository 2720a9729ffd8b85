"""Conversations are rendered, encoded and decoded as transformers itself does it."""

import pytest
from transformers.utils import chat_template_utils

from rollfarm.chat import ChatTemplate
from tests.llm_proxy import models

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it sunny?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tells <it>"}}]
READING = """{% for m in messages %}{{ m.role }}{{ m.nothing }}{{ m.nothing is defined }}{{ m['content'] }}\
{% for key, value in m.items() %}{{ key }}{{ value }}{% endfor %}{{ m.get('x') }}{{ m.content.upper() }}\
{{ m.clear is defined }}{{ m.__class__ is defined }}{{ loop.index }}{% endfor %}{{ tools[0].function.name if tools }}"""
DATED = models.TEMPLATE + "{{ eos_token }}{{ strftime_now('%Y') }}{{ mood }}"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [models.TEMPLATE, DATED, READING])
def test_a_conversation_is_rendered_as_transformers_renders_it(template, prompt, tools):
    tokenizer = models.tokenizer(template)
    chat_template_utils._compile_jinja_template.cache_clear()
    expected = tokenizer.apply_chat_template(
        MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False, mood="glad"
    )

    rendered = ChatTemplate(tokenizer, {"mood": "glad"}).render(MESSAGES, tools=tools, prompt=prompt)

    assert rendered == expected


def test_a_model_with_a_template_for_tools_has_it_used_where_there_are_any():
    tokenizer = models.tokenizer(models.TEMPLATE + "   ")
    tokenizer.chat_template = {"default": models.TEMPLATE, "tool_use": "{{ tools | length }} tools"}
    chat = ChatTemplate(tokenizer)

    assert chat.render(MESSAGES, tools=TOOLS) == "1 tools"
    assert chat.render(MESSAGES) == models.chat().render(MESSAGES)


@pytest.mark.parametrize("tidies", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_tokens_are_decoded_as_transformers_decodes_them(tidies, skip):
    tokenizer = models.tokenizer(models.TEMPLATE + " " * (4 + tidies))
    tokenizer.clean_up_tokenization_spaces = tidies
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = models.encode("<|im_start|>It is , I think , sunny .<|im_end|>")

    text = ChatTemplate(tokenizer).decode(ids, skip_special_tokens=skip)

    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    assert (" ," in text) is not tidies
