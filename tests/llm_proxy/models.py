"""A byte-level tokenizer with a chat template as Qwen's, and a policy that writes what a test says."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollfarm.chat import ChatTemplate

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
VOCABULARY = 420

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role != 'system' %}
{{- raise_exception('Unexpected role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

FORGETFUL = TEMPLATE.replace(
    "{%- if message.reasoning_content %}",
    "{%- if message.reasoning_content and messages[loop.index0:] | selectattr('role', 'eq', 'user') | list == [] %}",
)
"""Strips the thoughts of former turns once the user says more, as Qwen3's does."""

TEXT = """Where do you live? What is the weather in Paris? It is sunny, 21 degrees. The tool says 42. Let me look.
{"name": "weather", "arguments": {"city": "Paris"}} {"type": "function", "function": {"description": "x"}} user
assistant system tools tool_response I think the answer is that you are a helpful assistant. Thank you, and good bye."""


@functools.cache
def tokenizer(template: str = TEMPLATE) -> Any:
    """Trained on the spot: every byte is a token, some words are."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=VOCABULARY - len(MARKS), special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT] * 5, trainer)
    model.add_tokens(MARKS)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


@functools.cache
def chat(template: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate(tokenizer(template))


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=False)


class Script:
    """A policy that writes one of its texts after each prompt, by the text of the prompt, and keeps what it saw."""

    def __init__(self, write: Callable[[str], str]) -> None:
        self._write = write
        self._answers: dict[tuple[int, ...], list[int]] = {}
        self._next: list[int] = []
        self.prompts: list[list[int]] = []

    def __call__(self, ids: Sequence[int], version: int) -> int:
        """The next token. What is continued is told by the longest prompt that was begun."""
        for prompt, answer in reversed(self._answers.items()):
            made = len(ids) - len(prompt)
            if 0 <= made < len(answer) and tuple(ids) == (*prompt, *answer[:made]):
                return answer[made]
        self.prompts.append(list(ids))
        self._answers[tuple(ids)] = self._next or encode(self._write(decode(ids)))
        self._next = []
        return self._answers[tuple(ids)][0]

    def say(self, ids: list[int]) -> None:
        """Write these tokens next, whatever is asked."""
        self._next = ids

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """What was written after this prompt."""
        return self._answers[tuple(prompt)]


def save(folder: Path, template: str = TEMPLATE) -> Path:
    """A model folder with this tokenizer and random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    mine = tokenizer(template)
    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config: Any = Qwen3Config(
        vocab_size=len(mine), max_position_embeddings=2048, eos_token_id=mine.eos_token_id, **size, **heads
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    mine.save_pretrained(folder)
    return folder
