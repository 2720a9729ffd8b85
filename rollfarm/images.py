"""Images on their way from an environment to the model: which are taken, how they travel, and what the model sees.

An image is a PNG or a JPEG, and travels as it was encoded; in one message it is written once, and named by its SHA-256
after that. The model's own image processor says how many placeholder tokens stand for it, and makes pixels of it. That
needs Pillow and transformers, which are imported where they are used, and never torch.

Legend: I images, N patches of all of them, D values of a patch.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfarm.config import ConfigError
from rollfarm.v1 import trajectory_pb2

MOST_BYTES = 8 * 1024 * 1024
"""Of one encoded image."""

MOST_PIXELS = 64 * 1024 * 1024
"""Of one image: a small file may hold a large one."""

MEDIA_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG"}
"""Those that are taken, by Pillow's name."""

MODES = ("RGB", "L")
"""Colours that are taken: every reader makes the same of them."""

ORIENTATION = 0x0112
"""EXIF's tag: some readers turn the image by it, and others do not."""

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Architectures whose images are understood, by transformers' name."""


class BadImage(ValueError):
    """It is none that is taken; says why."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among tokens."""

    data: bytes
    """As it was encoded."""

    media_type: str

    offset: int
    """Where its placeholder tokens begin."""

    count: int
    """How many they are, at least 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Images as a vision tower takes them."""

    pixels_ND: NDArray[np.float32]
    """The patches of each image in its turn, in the order of the tower: the patches of one token side by side."""

    grid_I3: NDArray[np.int64]
    """Patches of each image in time (1), height and width."""


def expand(
    ids: NDArray[np.int32], shown: Sequence[tuple[bytes, str, int]], token_id: int
) -> tuple[NDArray[np.int32], list[PlacedImage]]:
    """The tokens, each image's placeholder as often as the image has tokens; and where the images then are.

    ids     with one placeholder, `token_id`, for each image
    shown   of each image its bytes, its media type and its tokens

    Raises BadImage where there are more placeholders or less than images.
    """
    at = (ids == token_id).nonzero()[0]
    if len(at) != len(shown):
        raise BadImage(f"{len(shown)} images are shown, and the text holds the placeholders of {len(at)}")
    counts = np.ones(len(ids), np.int64)
    counts[at] = [count for _, _, count in shown]
    begins = (np.cumsum(counts) - counts)[at].tolist()
    placed = [PlacedImage(data, kind, begin, count) for begin, (data, kind, count) in zip(begins, shown, strict=True)]
    return np.repeat(ids, counts), placed


def place(
    parts: Iterable[trajectory_pb2.ImagePart], token_count: int, known: dict[bytes, bytes], *, at: int = 0
) -> list[PlacedImage]:
    """The images among `token_count` tokens, which begin at `at`.

    `known` holds the images of the same message so far by their SHA-256, and gets those that are new. Raises BadImage.
    """
    placed: list[PlacedImage] = []
    end = 0
    for part in parts:
        if part.media_type not in MEDIA_TYPES:
            raise BadImage(f"an image is {part.media_type!r}, not one of {', '.join(MEDIA_TYPES)}")
        if part.data and known.get(part.sha256) is None:
            if sha256(part.data).digest() != part.sha256:
                raise BadImage("the SHA-256 of an image is not that of its bytes")
            known[part.sha256] = part.data
        data = known.get(part.sha256)
        if data is None:
            raise BadImage("the bytes of an image are not there")
        if not (end <= part.token_offset and 0 < part.token_count <= token_count - part.token_offset):
            raise BadImage(
                f"an image stands for {part.token_count} tokens from {part.token_offset} of {token_count}, or for "
                "those of another image"
            )
        end = part.token_offset + part.token_count
        placed.append(PlacedImage(data, part.media_type, at + part.token_offset, part.token_count))
    return placed


def write_once(images: Iterable[PlacedImage], written: set[bytes]) -> list[trajectory_pb2.ImagePart]:
    """The images as they travel. `written` holds the SHA-256 of those that the message holds, and gets others'."""
    parts: list[trajectory_pb2.ImagePart] = []
    for image in images:
        name = _digest(image.data)
        parts.append(
            trajectory_pb2.ImagePart(
                data=b"" if name in written else image.data,
                media_type=image.media_type,
                token_offset=image.offset,
                token_count=image.count,
                sha256=name,
            )
        )
        written.add(name)
    return parts


class ImageTokens:
    """What one model makes of images."""

    def __init__(self, processor: Any, token_id: int) -> None:
        """`processor` is transformers' image processor of the model; `token_id` its placeholder for images."""
        self._processor = processor
        self.token_id = token_id
        self.merge: int = processor.merge_size
        """Patches of a token, to each side."""

        self.patch_values: int = 3 * processor.temporal_patch_size * processor.patch_size**2
        """D."""

    def count(self, data: bytes, media_type: str) -> int:
        """Placeholder tokens for the image, which is looked at as far as its header. Raises BadImage."""
        with _opened(data, media_type) as opened:
            width, height = opened.size
        try:
            patches = int(self._processor.get_number_of_image_patches(height, width))
        except ValueError as error:
            raise BadImage(f"the model takes no image of {width} x {height}: {error}") from None
        return patches // self.merge**2

    def save(self, folder: Path) -> None:
        """Write the image processor beside an exported model."""
        self._processor.save_pretrained(folder)

    def fitted(self, data: bytes, media_type: str) -> tuple[bytes, str]:
        """The image as large as the model sees it: itself, or a PNG that was resized.

        So every reader sees the same pixels: those that resize with another library get none to resize. Raises BadImage
        unless it is an image that is taken, to its last pixel.
        """
        check(data, media_type)
        processor = self._processor
        with _opened(data, media_type) as opened:
            width, height = opened.size
            pixels_CHW = np.moveaxis(np.asarray(opened.convert("RGB")), -1, 0)
        try:
            resized_CHW: NDArray[np.uint8] = processor.resize(
                pixels_CHW, processor.size, processor.resample, processor.patch_size * self.merge
            )
        except ValueError as error:
            raise BadImage(f"the model takes no image of {width} x {height}: {error}") from None
        if resized_CHW.shape == pixels_CHW.shape:
            return data, media_type
        buffer = io.BytesIO()
        _pillow().fromarray(np.ascontiguousarray(np.moveaxis(resized_CHW, 0, -1))).save(buffer, "PNG")
        return buffer.getvalue(), "image/png"

    def patches(self, images: Sequence[PlacedImage]) -> Patches:
        """The images as the vision tower takes them. Raises BadImage where they cannot be decoded."""
        decoded: list[Any] = []
        for image in images:
            try:
                with _opened(image.data, image.media_type) as opened:
                    decoded.append(opened.convert("RGB"))
            except (OSError, SyntaxError) as error:
                raise BadImage(f"an image cannot be decoded: {error}") from None
        made = self._processor(images=decoded, return_tensors="np")
        return Patches(
            np.asarray(made["pixel_values"], np.float32), np.asarray(made["image_grid_thw"], np.int64).reshape(-1, 3)
        )


@lru_cache(8)
def load(path: str) -> ImageTokens | None:
    """What the model at `path` makes of images; None where its architecture is not among MODEL_TYPES.

    Raises ConfigError where there is no such model, or it has no image processor.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
        if config.model_type not in MODEL_TYPES:
            return None
        return ImageTokens(_processor(path), config.image_token_id)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: the images of {path!r} cannot be processed: {error}") from None


def auto_class(model_type: str) -> Any:
    """What transformers loads models of the architecture by: those that are read with a head, and with their vision
    tower where it is understood. Needs torch."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type in MODEL_TYPES else AutoModelForCausalLM


def check(data: bytes, media_type: str) -> None:
    """Raise BadImage unless it is an image that is taken, to its last pixel."""
    if not 0 < len(data) <= MOST_BYTES:
        raise BadImage(f"an image has {len(data)} bytes; 1 to {MOST_BYTES} are taken")
    with _opened(data, media_type) as opened:
        try:
            opened.load()
            turned = opened.getexif().get(ORIENTATION, 1) != 1
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"an image cannot be decoded: {error}") from None
    if turned:
        raise BadImage("an image's EXIF says that it is turned: turn its pixels instead")


def _processor(path: str) -> Any:
    """That of Pillow, whatever else is installed: every process shall make the same pixels."""
    _pillow()
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(path, backend="pil")


def _opened(data: bytes, media_type: str) -> Any:
    """Pillow's image, whose header was looked at. Raises BadImage."""
    image = _pillow()
    if media_type not in MEDIA_TYPES:
        raise BadImage(f"an image is {media_type!r}, not one of {', '.join(MEDIA_TYPES)}")
    try:
        opened = image.open(io.BytesIO(data), formats=[MEDIA_TYPES[media_type]])
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        raise BadImage(f"an image is no {media_type}: {error}") from None
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise BadImage(f"an image has {width} x {height} pixels; at most {MOST_PIXELS} are taken")
    if opened.mode not in MODES:
        raise BadImage(f"an image's mode is {opened.mode}; {' and '.join(MODES)} are taken: convert it")
    return opened


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("Images need Pillow. Install it: pip install 'rollfarm[images]'.") from None
    return Image


def _digest(data: bytes) -> bytes:
    return sha256(data).digest()
