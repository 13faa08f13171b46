"""Rotary position embedding (Su et al., 2021; half-split layout as in Llama and Qwen) and the paged KV write."""

from __future__ import annotations

import torch


def rope_table(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [length, head_dim] float32, angles computed in float64."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos().float(), angles.sin().float()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, D]; cos, sin: [T, D] of each token's position."""
    left, right = x.chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    return (x.float() * cos[:, None] + turned.float() * sin[:, None]).to(x.dtype)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write new keys and values into the pages of one layer.

    k, v: [T, kv_heads, D]; pools: [pages, kv_heads, page, D]; slots: [T] int64, page * page_size + offset. A negative
    slot writes nothing (padding).
    """
    page_size = k_pool.shape[2]
    if bool((slots < 0).any()):
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    page, offset = torch.div(slots, page_size, rounding_mode="floor"), slots % page_size
    k_pool[page, :, offset] = k.to(k_pool.dtype)
    v_pool[page, :, offset] = v.to(v_pool.dtype)
