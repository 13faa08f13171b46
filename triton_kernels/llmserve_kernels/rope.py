"""Rotary position embedding (Su et al., 2021; half-split layout as in Llama and Qwen) and the paged KV write."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class KVSlots:
    """Where the new tokens of a step are written, worked out once for all layers. `kept` is None when all are."""

    page: torch.Tensor
    offset: torch.Tensor
    kept: torch.Tensor | None

    @classmethod
    def of(cls, slots: torch.Tensor, page_size: int) -> KVSlots:
        """slots: [T] int64, page * page_size + offset; a negative one (padding) writes nothing."""
        kept = slots >= 0
        if bool(kept.all()):
            return cls(torch.div(slots, page_size, rounding_mode="floor"), slots % page_size, None)
        slots = slots[kept]
        return cls(torch.div(slots, page_size, rounding_mode="floor"), slots % page_size, kept)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, slots: KVSlots) -> None:
    """Write new keys and values, [T, kv_heads, D] each, into one layer's pools [pages, kv_heads, page, D]."""
    if slots.kept is not None:
        k, v = k[slots.kept], v[slots.kept]
    k_pool[slots.page, :, slots.offset] = k.to(k_pool.dtype)
    v_pool[slots.page, :, slots.offset] = v.to(v_pool.dtype)
