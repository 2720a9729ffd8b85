"""What is taken for an image, how it travels, and what a model sees of it."""

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollfarm import images
from rollfarm.images import BadImage, ImageTokens, PlacedImage
from tests.vision import IMAGE_ID, make_model, picture

PNG, JPEG = "image/png", "image/jpeg"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def eyes(path: Path) -> ImageTokens:
    found = images.load(str(path))
    assert found is not None
    return found


def turned() -> bytes:
    """A JPEG that says that it lies on its side."""
    exif = Image.Exif()
    exif[images.ORIENTATION] = 6
    buffer = io.BytesIO()
    Image.new("RGB", (28, 56)).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "media_type", "problem"),
    [
        (b"", PNG, "has 0 bytes"),
        (b"hello", PNG, "is no image/png"),
        (picture(28, 28, kind="JPEG"), PNG, "is no image/png"),
        (picture(28, 28), "image/gif", "'image/gif', not one of image/png, image/jpeg"),
        (picture(28, 28)[:-30], PNG, "cannot be decoded"),
        (picture(28, 28, mode="RGBA"), PNG, "mode is RGBA; RGB and L are taken"),
        (turned(), JPEG, "EXIF says that it is turned"),
    ],
)
def test_what_readers_may_see_differently_is_no_image(data: bytes, media_type: str, problem: str) -> None:
    with pytest.raises(BadImage, match=problem):
        images.check(data, media_type)


def test_an_image_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", 100)
    with pytest.raises(BadImage, match="bytes; 1 to 100 are taken"):
        images.check(picture(28, 28), PNG)
    monkeypatch.setattr(images, "MOST_BYTES", 10_000)
    monkeypatch.setattr(images, "MOST_PIXELS", 28 * 28)
    with pytest.raises(BadImage, match="29 x 28 pixels; at most 784"):
        images.check(picture(29, 28), PNG)


@pytest.mark.parametrize(("mode", "kind", "media_type"), [("RGB", "PNG", PNG), ("L", "PNG", PNG), ("L", "JPEG", JPEG)])
def test_images_in_colour_and_in_grey_are_taken(mode: str, kind: str, media_type: str) -> None:
    images.check(picture(30, 30, mode=mode, kind=kind), media_type)


@pytest.mark.parametrize("size", [(28, 28), (56, 84), (100, 60), (10, 300), (900, 700)])
def test_an_image_has_as_many_tokens_as_its_patches_make(eyes: ImageTokens, size: tuple[int, int]) -> None:
    data = picture(*size)
    count = eyes.count(data, PNG)

    patches = eyes.patches([PlacedImage(data, PNG, 0, count)])

    assert count == len(patches.pixels_ND) // eyes.merge**2 == patches.grid_I3.prod() // eyes.merge**2
    assert patches.pixels_ND.shape[1] == eyes.patch_values


@pytest.mark.parametrize("size", [(100, 60), (900, 700), (20, 20)])
def test_a_fitted_image_is_what_the_model_sees_and_stays_as_it_is(eyes: ImageTokens, size: tuple[int, int]) -> None:
    data = picture(*size)
    fitted = eyes.fitted(data, PNG)

    seen, again = (eyes.patches([PlacedImage(each, PNG, 0, 1)]) for each in (data, fitted[0]))

    assert fitted[0] != data
    assert np.array_equal(seen.pixels_ND, again.pixels_ND)
    assert eyes.fitted(*fitted) == fitted
    assert eyes.count(*fitted) == eyes.count(data, PNG)


def test_an_image_that_fits_is_not_encoded_anew(eyes: ImageTokens) -> None:
    data = picture(56, 28, kind="JPEG")

    assert eyes.fitted(data, JPEG) == (data, JPEG)


def test_an_image_that_the_model_takes_in_no_size_is_refused(eyes: ImageTokens) -> None:
    with pytest.raises(BadImage, match="takes no image of 6000 x 1"):
        eyes.fitted(picture(6000, 1), PNG)


def test_a_placeholder_becomes_as_many_as_the_image_has_tokens() -> None:
    ids = np.array([3, IMAGE_ID, 4, 5, IMAGE_ID], np.int32)

    expanded, placed = images.expand(ids, [(b"a", PNG, 3), (b"b", JPEG, 2)], IMAGE_ID)

    assert expanded.tolist() == [3, IMAGE_ID, IMAGE_ID, IMAGE_ID, 4, 5, IMAGE_ID, IMAGE_ID]
    assert placed == [PlacedImage(b"a", PNG, 1, 3), PlacedImage(b"b", JPEG, 6, 2)]
    with pytest.raises(BadImage, match="1 images are shown, and the text holds the placeholders of 2"):
        images.expand(ids, [(b"a", PNG, 3)], IMAGE_ID)


def test_an_image_travels_once_and_arrives_wherever_it_was() -> None:
    placed = [PlacedImage(b"a" * 1000, PNG, 1, 3), PlacedImage(b"b", JPEG, 6, 2), PlacedImage(b"a" * 1000, PNG, 9, 3)]
    written: set[bytes] = set()

    first, second = images.write_once(placed[:2], written), images.write_once(placed[2:], written)
    known: dict[bytes, bytes] = {}
    back = [*images.place(first, 8, known), *images.place(second, 12, known, at=100)]

    assert sum(part.ByteSize() for part in [*first, *second]) < 1200
    assert back == [*placed[:2], replace(placed[2], offset=109)]


def test_the_image_processor_is_read_without_torch(path: Path) -> None:
    code = (
        "import sys; from rollfarm import chat, images; chat.load(sys.argv[1]); "
        "eyes = images.load(sys.argv[1]); data = open(sys.argv[2], 'rb').read(); "
        "print(eyes.count(*eyes.fitted(data, 'image/png')), 'torch' in sys.modules)"
    )
    file = path.parent / "image.png"
    file.write_bytes(picture(100, 60))

    said = subprocess.run([sys.executable, "-c", code, path, file], capture_output=True, text=True, check=True).stdout

    assert said.split() == ["8", "False"]


def test_a_model_of_another_architecture_has_no_eyes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')

    assert images.load(str(tmp_path)) is None
