"""Vision-language models of the Qwen-VL kind: images to embeddings, in the places of their placeholder tokens.

Where an image is comes from the row and never from the ids, since a policy may write the placeholder itself: here it is
a token like others then. Engines refuse a prompt that shows images and has it elsewhere, which ends the episode. Every
pass runs the vision tower, over a blank image where it has none: the passes of ranks stay alike, and every parameter
has a gradient.

Legend: T positions of a micro-batch, R its rows, L positions of the longest, H hidden width, I images, N their patches.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollfarm import images
from rollfarm.errors import InvalidTrajectory
from rollfarm.images import ImageTokens, Patches
from trainer.micro_batches import MicroBatch


def eyes_of(model: PreTrainedModel) -> ImageTokens | None:
    """What the model makes of images; None where it takes none. Raises ConfigError."""
    return images.load(model.name_or_path) if model.config.model_type in images.MODEL_TYPES else None


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """What turns embeddings into hidden states."""
    return cast(Any, model.base_model).language_model


def decoder_inputs(model: PreTrainedModel, eyes: ImageTokens, batch: MicroBatch, *, packed: bool) -> dict[str, Any]:
    """What the decoder is called with: rows end to end where it is packed, and padded otherwise."""
    patches = eyes.patches(batch.images) if batch.images else _blank(eyes)
    grid_I3 = torch.as_tensor(patches.grid_I3, device=batch.ids_T.device)
    pixels_ND = torch.as_tensor(patches.pixels_ND, device=batch.ids_T.device)
    seen = cast(Any, model.base_model).get_image_features(pixels_ND, grid_I3, return_dict=True)
    features = [torch.cat(list(seen.pooler_output))]
    # DeepStack (Meng et al. 2024): what further layers of the tower see is added behind the decoder's first layers.
    features += [torch.cat(list(layer)) for layer in getattr(seen, "deepstack_features", None) or ()]
    embeds_TH = model.get_input_embeddings()(batch.ids_T)
    place_3T = torch.as_tensor(positions(batch, patches.grid_I3 // [1, eyes.merge, eyes.merge]))
    place_3T = place_3T.to(batch.ids_T.device)
    if not batch.images:
        embeds_TH = embeds_TH + 0.0 * torch.stack([layer.float().sum() for layer in features]).sum().to(embeds_TH.dtype)
        return _laid_out(batch, embeds_TH, place_3T, packed=packed)
    is_image_T = torch.zeros_like(batch.mask_T)
    for image in batch.images:
        is_image_T[image.offset : image.offset + image.count] = True
    embeds_TH = embeds_TH.masked_scatter(is_image_T[:, None], features[0].to(embeds_TH.dtype))
    inputs = _laid_out(batch, embeds_TH, place_3T, packed=packed)
    if features[1:]:
        inputs["visual_pos_masks"] = is_image_T[None] if packed else batch.padded(is_image_T)
        inputs["deepstack_visual_embeds"] = [layer.to(embeds_TH.dtype) for layer in features[1:]]
    return inputs


def positions(batch: MicroBatch, grid_I3: NDArray[np.int64]) -> NDArray[np.int64]:
    """i64[3, T], time, height and width of each position in its row: M-RoPE (Wang et al. 2024, Qwen2-VL, section 2.1).

    They are the same for a token, and count up. The tokens of an image, `grid_I3` of them in time, height and width,
    stand where it begins, and differ by where they are in it; what follows goes on after the longer side. Raises
    InvalidTrajectory where an image has another number of tokens than placeholders.
    """
    step_T = np.ones(int(batch.lengths_R.sum()), np.int64)
    within_3T = np.zeros((3, len(step_T)), np.int64)
    for image, (depth, height, width) in zip(batch.images, grid_I3.tolist(), strict=False):
        if depth * height * width != image.count:
            raise InvalidTrajectory(
                f"An image stands for {image.count} tokens, and the trainer's model makes {depth * height * width} of "
                "it: env_manager has another model."
            )
        place = slice(image.offset, image.offset + image.count)
        within_3T[:, place] = np.indices((depth, height, width)).reshape(3, -1)
        step_T[place] = 0
        step_T[place.stop - 1] = max(height, width)
    begin_T = np.cumsum(step_T) - step_T
    lengths_R = batch.lengths_R.cpu().numpy()
    return begin_T - np.repeat(begin_T[np.cumsum(lengths_R) - lengths_R], lengths_R) + within_3T


def _laid_out(batch: MicroBatch, embeds_TH: Tensor, place_3T: Tensor, *, packed: bool) -> dict[str, Any]:
    if packed:
        # The first is the one that tells where rows begin.
        place_41T = torch.cat([batch.position_T[None], place_3T])[:, None]
        return {"inputs_embeds": embeds_TH[None], "position_ids": place_41T}
    place_3RL = torch.stack([batch.padded(place_T) for place_T in place_3T])
    return {"inputs_embeds": batch.padded(embeds_TH), "position_ids": place_3RL}


def _blank(eyes: ImageTokens) -> Patches:
    """An image of one token, for passes that have none."""
    pixels_ND = np.zeros((eyes.merge**2, eyes.patch_values), np.float32)
    return Patches(pixels_ND, np.array([[1, eyes.merge, eyes.merge]], np.int64))
