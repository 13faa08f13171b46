"""The input of one model step: sequences of different lengths, flattened, over one paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """T new tokens of S sequences, one sequence after the other.

    token_ids, positions: [T] int64.
    slot_mapping: [T] int64, `page * page_size + offset` where the token's K and V are written; negative writes nothing.
    page_table: [S, max_pages] int32, page ids of each sequence in order (padding: 0, never read).
    query_start: list of S + 1 ints, new tokens of sequence s are [query_start[s], query_start[s + 1]).
    seq_lens: list of S ints, tokens of sequence s in the cache after this step (cached + new).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    page_table: torch.Tensor
    query_start: list[int]
    seq_lens: list[int]


@dataclass(slots=True)
class KVCache:
    """Paged KV cache of one rank: K and V pools of [num_layers, num_pages, kv_heads, page_size, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.k.shape[3]

    @property
    def num_pages(self) -> int:
        return self.k.shape[1]
