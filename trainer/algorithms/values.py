"""What a critic learns.

Legend: T tokens.
"""

import torch
from torch import Tensor


def value_loss(
    value_T: Tensor, old_value_T: Tensor, return_T: Tensor, *, clip: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token (Schulman's PPO code; Engstrom et
    al., arXiv 2005.12729, section 3). `clip` 0 leaves the first alone.

    value_T      f32[T]  what the critic expects before the token, in units of reward; has grad
    old_value_T  f32[T]  the same as the step began
    return_T     f32[T]  what it should have expected

    Metrics are sums over tokens.
    """
    square_T = (value_T - return_T).square()
    near_T = old_value_T + (value_T - old_value_T).clamp(-clip, clip)
    clipped_T = (near_T - return_T).square() if clip else square_T
    error_T = (return_T - old_value_T).detach()
    return torch.maximum(square_T, clipped_T) / 2, {
        "value": value_T.detach().sum(),
        "clipped": (clipped_T > square_T).sum(),
        "return": return_T.sum(),
        "return_square": return_T.square().sum(),
        "error": error_T.sum(),
        "error_square": error_T.square().sum(),
    }


def explained_variance(error: float, error_square: float, returned: float, return_square: float) -> float:
    """1 - Var(R - V) / Var(R), from the means of each and of its square: 1 is perfect, 0 is no better than a constant.
    0 where all returns are alike."""
    variance = return_square - returned**2
    return 1 - (error_square - error**2) / variance if variance > 1e-12 else 0.0
