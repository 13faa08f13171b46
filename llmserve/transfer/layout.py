"""How a KV cache lies in memory, as both sides of a hand-off state it in their handshake."""

from __future__ import annotations

import msgspec


class KVLayout(msgspec.Struct, kw_only=True, frozen=True):
    """Layout of one rank's paged KV cache.

    A page of one layer is `[kv_heads_of_this_rank, page_size, head_dim]` (HND: tokens of one head contiguous). The
    region of a rank holds `[2 (K, V), num_layers, num_pages, kv_heads_of_this_rank, page_size, head_dim]`.
    """

    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    page_size: int
    dtype: str  # "float32" | "bfloat16"
    num_pages: int  # of this rank's pool: may differ between the two sides
    tp_size: int = 1
    tp_rank: int = 0
    order: str = "HND"
