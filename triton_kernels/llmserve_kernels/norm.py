"""RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension, in float32. x: [..., D]; weight: [D], or [heads, D] for a weight of each head."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
