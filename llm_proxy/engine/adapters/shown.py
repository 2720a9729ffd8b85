"""What a request shows, as inference servers take it: images by URLs that hold them, and in the prompt a token each."""

import base64

import numpy as np

from llm_proxy.engine.requests import Request
from rollfarm.tokens import Ids


def folded(request: Request) -> Ids:
    """The prompt with one token for each image, of which the server makes as many as it takes."""
    kept = np.ones(len(request.prompt), np.bool_)
    for image in request.images:
        kept[image.offset + 1 : image.offset + image.count] = False
    return request.prompt[kept]


def data_urls(request: Request) -> list[str]:
    """The images, in the order of the prompt."""
    return [f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}" for image in request.images]
