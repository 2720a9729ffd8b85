"""An environment that shows pictures, and a model that sees them: which colour has the picture?

`python examples/colour.py` makes models/colour, a tiny Qwen2.5-VL with random weights; then
`rollfarm up examples/colour.toml` trains it. docs/environments.md explains.
"""

import argparse
import io
import random
from pathlib import Path
from typing import Any

from rollfarm.env import Environment, Image, Observation, Step

COLOURS = {"red": (200, 50, 50), "green": (50, 200, 50), "blue": (50, 50, 200)}
SIDE = 56
"""Of a picture, in pixels: four tokens."""

CONTEXT_TOKENS = 64
BEGIN, IMAGE, FINISH, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
"""By these names engines look for them."""

SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<assistant>", BEGIN, IMAGE, FINISH, VIDEO]
IDS = {word: index for index, word in enumerate([*SPECIAL, "which", "colour", *COLOURS])}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> "
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endif %}<end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)

DECODER = {
    "vocab_size": len(IDS),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "pad_token_id": IDS["<pad>"],
    "eos_token_id": IDS["<end>"],
    "bos_token_id": None,
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 1,
    "out_hidden_size": 64,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}


class Colour(Environment):
    """One picture in shades of one colour, and one answer."""

    def reset(self, seed: int, index: int) -> Observation:
        chance = random.Random(seed)
        self.colour = chance.choice(list(COLOURS))
        return Observation("which colour", images=[Image(paint(self.colour, chance))])

    def step(self, action: str) -> Step:
        right = float(action.strip() == self.colour)
        return Step(reward=right, done=True, metrics={"success": right})


def paint(colour: str, chance: random.Random) -> bytes:
    """A PNG."""
    from PIL import Image as Pictures

    pixels = bytes(shade + chance.randint(-50, 50) for _ in range(SIDE * SIDE) for shade in COLOURS[colour])
    png = io.BytesIO()
    Pictures.frombytes("RGB", (SIDE, SIDE), pixels).save(png, "PNG")
    return png.getvalue()


def make_model(folder: Path) -> None:
    """Model, tokenizer and image processor."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words: Any = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
    )
    config = Qwen2_5_VLConfig(
        text_config=DECODER,
        vision_config=TOWER,
        image_token_id=IDS[IMAGE],
        video_token_id=IDS[VIDEO],
        vision_start_token_id=IDS[BEGIN],
        vision_end_token_id=IDS[FINISH],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=SIDE**2, max_pixels=SIDE**2).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/colour"), help="folder (default: %(default)s)")
    make_model(parser.parse_args().out)
