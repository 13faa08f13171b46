"""Mixture of experts after the attention block: router, grouped experts with SwiGLU, top-k weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llmserve_kernels.linear import ROWS_PER_THREAD, LinearWeight, multiply, padded_rows, round_activation

FEW_TOKENS = 16  # up to here, if most experts are hit, all are computed as one batched product


@dataclass(slots=True)
class ExpertWeights:
    """gate_up.wide: [experts, hidden, 2 * inner] (gate columns first); down.wide: [experts, inner, hidden]."""

    gate_up: LinearWeight
    down: LinearWeight

    @property
    def num_experts(self) -> int:
        return self.gate_up.wide.shape[0]


def route(x: torch.Tensor, router: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the top k. x: [T, hidden]; router: [hidden, experts] float32.

    Returns weights [T, k] float32 and expert ids [T, k] int64. With `renormalize` the k weights sum to one.
    """
    probabilities = torch.softmax(multiply(x.float(), router), -1)
    weights, experts = probabilities.topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def fused_experts(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights) -> torch.Tensor:
    """sum_k weights[t, k] * down_e(silu(gate_e(x_t)) * up_e(x_t)), e = experts[t, k].

    x: [T, hidden]; weights, experts: [T, k]. The input of an expert and its inner activation are rounded to the
    weights' format; the sum over k is made in a fixed order. No tokens and experts without tokens are fine.
    """
    tokens, top_k = experts.shape
    if tokens == 0:
        return torch.zeros_like(x)
    assignment = experts.flatten()
    order = torch.argsort(assignment, stable=True)
    counts = torch.bincount(assignment, minlength=layer.num_experts).tolist()
    rounded = round_activation(x, layer.gate_up.format)
    rows = rounded[torch.div(order, top_k, rounding_mode="floor")]  # [T * k, hidden], grouped by expert
    hit = sum(count > 0 for count in counts)
    grouped = _batched if tokens <= FEW_TOKENS and 2 * hit > layer.num_experts else _looped
    gate, up = grouped(rows, layer.gate_up.wide, counts).chunk(2, -1)
    down = grouped(round_activation(F.silu(gate) * up, layer.down.format), layer.down.wide, counts)
    spread = torch.empty_like(down)
    spread[order] = down
    return torch.bmm(weights.unsqueeze(1), spread.view(tokens, top_k, -1)).squeeze(1).to(x.dtype)


def _looped(rows: torch.Tensor, wide: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One product per expert that has tokens. rows: [R, K] grouped by expert; wide: [experts, K, N] -> [R, N].

    Instead of padding as `multiply` does, a product takes the rows behind its own along, and drops what comes of those.
    """
    padded = F.pad(rows, (0, 0, 0, padded_rows(1)))
    parts: list[torch.Tensor] = []
    low = 0
    for expert, count in enumerate(counts):
        if count:
            parts.append((padded[low : low + padded_rows(count)] @ wide[expert])[:count])
            low += count
    return torch.cat(parts)


def _batched(rows: torch.Tensor, wide: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One batched product over all experts, each padded to the most tokens that any of them has."""
    most = max(ROWS_PER_THREAD, *counts)  # threads share the experts, not the rows of one
    slots = [expert * most + j for expert, count in enumerate(counts) for j in range(count)]
    padded = rows.new_zeros(len(counts) * most, rows.shape[1])
    padded[slots] = rows
    return torch.bmm(padded.view(len(counts), most, -1), wide).flatten(0, 1)[slots]
