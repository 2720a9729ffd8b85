"""Tiny vision-language models with random weights, and images for them."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollfarm import images
from rollfarm.checkpoint_names import CheckpointNames
from rollfarm.images import PlacedImage

Kind = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]

PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
BEGIN, FINISH, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = [PAD, UNKNOWN, END, "<user>", "<assistant>", "<system>", BEGIN, FINISH, IMAGE, VIDEO]
SPOKEN = "left right up down go stop ice hole 0 1 2 3 red green blue"
WORDS = [*SPECIAL, *SPOKEN.split()]
IDS = {word: index for index, word in enumerate(WORDS)}
IMAGE_ID = IDS[IMAGE]

CONTEXT_TOKENS = 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> "
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endif %}"
    "<end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "pad_token_id": IDS[PAD],
    "eos_token_id": IDS[END],
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
_IDS: dict[str, Any] = {
    "image_token_id": IMAGE_ID,
    "video_token_id": IDS[VIDEO],
    "vision_start_token_id": IDS[BEGIN],
    "vision_end_token_id": IDS[FINISH],
    "tie_word_embeddings": False,
}


def _model(kind: Kind) -> PreTrainedModel:
    match kind:
        case "qwen2_vl":
            tower: dict[str, Any] = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 1, "mlp_ratio": 2}
            tower |= {"in_chans": 3}
            return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=_TEXT, vision_config=tower, **_IDS))
        case "qwen2_5_vl":
            tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 64}
            tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=_TEXT, vision_config=tower, **_IDS))
        case "qwen3_vl":
            tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 1, "out_hidden_size": 64}
            tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64, "patch_size": 14}
            text = _TEXT | {"rope_parameters": _TEXT["rope_parameters"] | {"mrope_interleaved": True}}
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **_IDS))


def make_model(folder: Path, kind: Kind = "qwen2_5_vl", *, seed: int = 0) -> Path:
    """The folder, with model, tokenizer and image processor in it."""
    words = Tokenizer(WordLevel(IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=SPECIAL[3:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(kind)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28).save_pretrained(folder)
    return folder


class Reference:
    """A model as transformers has it, with its own positions."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """`tensors` as `other_weights` gives them, in place of those of the folder."""
        eyes = images.load(str(path))
        assert eyes is not None
        self._eyes = eyes
        self._model: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if tensors is not None:
            own = CheckpointNames(self._model).views(dict(self._model.named_parameters()))
            with torch.no_grad():
                for name, tensor in tensors.items():
                    own[name].copy_(tensor)

    @torch.no_grad()
    def logprobs(self, ids: ArrayLike, seen: Sequence[PlacedImage]) -> NDArray[np.float32]:
        """[T, V], what follows each token.

        The model takes every placeholder for an image. One that a policy wrote is shown to it by a token that is not
        there, which gets its embedding, as engines do.
        """
        ids_1T = torch.as_tensor(np.asarray(ids, np.int64))[None]
        kinds_1T = torch.zeros(ids_1T.shape, dtype=torch.int32)
        for image in seen:
            kinds_1T[0, image.offset : image.offset + image.count] = 1
        pixels: dict[str, Any] = {}
        if seen:
            patches = self._eyes.patches(seen)
            pixels["pixel_values"] = torch.tensor(patches.pixels_ND)
            pixels["image_grid_thw"] = torch.tensor(patches.grid_I3)
        embeddings = self._model.get_input_embeddings().weight
        spare = next(token for token in range(len(WORDS)) if token not in ids_1T)
        saved = embeddings[spare].clone()
        embeddings[spare] = embeddings[IMAGE_ID]
        shown_1T = ids_1T.masked_fill((ids_1T == IMAGE_ID) & (kinds_1T == 0), spare)
        logits_1TV = self._model(input_ids=shown_1T, mm_token_type_ids=kinds_1T, **pixels).logits
        embeddings[spare] = saved
        return logits_1TV[0].log_softmax(-1).numpy()


def other_weights(path: Path, *, seed: int) -> dict[str, Tensor]:
    """Values unlike those of the folder, as they travel to engines."""
    dice = torch.Generator().manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return {
        name: tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=dice)
        for name, tensor in CheckpointNames(model).stream(model.named_parameters())
    }


def picture(width: int, height: int, *, seed: int = 0, mode: str = "RGB", kind: str = "PNG") -> bytes:
    """An encoded image of noise."""
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise, mode).save(buffer, kind)
    return buffer.getvalue()
