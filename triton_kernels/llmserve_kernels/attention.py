"""Causal attention over a paged HND cache: prefill chunks and decodes, of different lengths, in one call.

Reference for all devices. Scores and sums are float64 and rounded once, so a token's result does not depend on what it
is batched or chunked with, nor on which pages hold its context.
"""

from __future__ import annotations

import torch

QUERY_TILE = 128  # queries whose scores exist at the same time


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    query_start: list[int],
    seq_lens: list[int],
    scale: float,
) -> torch.Tensor:
    """q: [T, heads, D]; pools: [pages, kv_heads, page, D]; page_table: [S, max_pages]; see ForwardBatch for the rest.

    Query i of sequence s stands at position seq_lens[s] - (its number of queries) + i and sees all positions up to its
    own. Page slots past a sequence's length are never used, whatever they hold (NaN too). Returns [T, heads, D].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes = [s for s in range(len(seq_lens)) if query_start[s + 1] - query_start[s] == 1]
    if decodes:
        rows = [query_start[s] for s in decodes]
        lengths = [seq_lens[s] for s in decodes]
        table = page_table if len(decodes) == len(seq_lens) else page_table[decodes]
        out[rows] = _decode(q[rows], k_pool, v_pool, table, lengths, scale)
    for s, length in enumerate(seq_lens):
        low, high = query_start[s], query_start[s + 1]
        if high - low > 1:
            out[low:high] = _prefill(q[low:high], k_pool, v_pool, page_table[s], length, scale)
    return out


def _decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """One query a sequence. q: [S, heads, D]. The batch is padded to its longest context, and masked.

    Works page by page (scores and weighted sums of [S, pages] pages at once), so that pages are copied as they lie.
    """
    sequences, heads, dim = q.shape
    kv_heads, page = k_pool.shape[1], k_pool.shape[2]
    pages = -(-max(lengths) // page)
    index = table[:, :pages].flatten()
    keys = k_pool.index_select(0, index).view(sequences, pages, kv_heads, page, dim)
    values = v_pool.index_select(0, index).view(sequences, pages, kv_heads, page, dim)
    for s, length in enumerate(lengths):  # 0 * NaN of an unused slot would be NaN
        if length % page:
            values[s, length // page, :, length % page :] = 0.0
        values[s, -(-length // page) :] = 0.0
    grouped = q.reshape(sequences, 1, kv_heads, heads // kv_heads, dim).double()
    scores = torch.matmul(grouped, keys.double().transpose(-1, -2)).mul_(scale)  # [S, pages, kv_heads, group, page]
    limits = torch.tensor(lengths, device=q.device)
    hidden = torch.arange(pages * page, device=q.device) >= limits[:, None]
    scores.masked_fill_(hidden.view(sequences, pages, 1, 1, page), -torch.inf)
    weights = torch.softmax(scores.permute(0, 2, 3, 1, 4).flatten(3), -1)
    weights = weights.view(sequences, kv_heads, -1, pages, page).permute(0, 3, 1, 2, 4)
    return torch.matmul(weights, values.double()).sum(1).to(q.dtype).view(sequences, heads, dim)


def _gather(pool: torch.Tensor, index: torch.Tensor, sequences: int, pages: int) -> torch.Tensor:
    """Pages of each sequence side by side: [S, kv_heads, pages * page, D] float64."""
    _, kv_heads, page, dim = pool.shape
    picked = pool.index_select(0, index).view(sequences, pages, kv_heads, page, dim)
    out = torch.empty(sequences, kv_heads, pages, page, dim, dtype=torch.float64, device=pool.device)
    out.copy_(picked.transpose(1, 2))
    return out.view(sequences, kv_heads, pages * page, dim)


def _prefill(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, table: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    """A chunk of one sequence. q: [C, heads, D], positions length - C to length - 1."""
    count, heads, dim = q.shape
    kv_heads, page = k_pool.shape[1], k_pool.shape[2]
    pages = -(-length // page)
    keys = _gather(k_pool, table[:pages], 1, pages)[0, :, :length]  # [kv_heads, length, D]
    values = _gather(v_pool, table[:pages], 1, pages)[0, :, :length]
    grouped = q.reshape(count, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).double()  # [kv, group, C, D]
    out = torch.empty(count, kv_heads, heads // kv_heads, dim, dtype=q.dtype, device=q.device)
    first = length - count
    for low in range(0, count, QUERY_TILE):
        high = min(low + QUERY_TILE, count)
        seen = first + high  # positions that the last query of the tile sees
        tile = grouped[:, :, low:high].reshape(kv_heads, -1, dim)
        scores = torch.bmm(tile, keys[:, :seen].transpose(1, 2)).mul_(scale)
        scores = scores.view(kv_heads, -1, high - low, seen)
        positions = torch.arange(first + low, first + high, device=q.device)
        hidden = torch.arange(seen, device=q.device) > positions[:, None]
        weights = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1)
        summed = torch.bmm(weights.view(kv_heads, -1, seen), values[:, :seen])
        out[low:high] = summed.view(kv_heads, -1, high - low, dim).permute(2, 0, 1, 3).to(q.dtype)
    return out.view(count, heads, dim)
