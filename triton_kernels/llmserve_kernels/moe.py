"""Mixture of experts after the attention block: router, grouped experts with SwiGLU, top-k weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llmserve_kernels.linear import LinearWeight, round_activation

FEW_TOKENS = 16  # up to here, if most experts are hit, all are computed as one batched product


@dataclass(slots=True)
class ExpertWeights:
    """gate_up: [experts, 2 * inner, hidden] (gate rows first); down: [experts, hidden, inner]."""

    gate_up: LinearWeight
    down: LinearWeight

    @property
    def num_experts(self) -> int:
        return self.gate_up.wide.shape[0]


def route(x: torch.Tensor, router: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the top k. x: [T, hidden]; router: [experts, hidden] float64.

    Returns weights [T, k] float32 and expert ids [T, k] int64. With `renormalize` the k weights sum to one.
    """
    probabilities = torch.softmax(F.linear(x.to(router.dtype), router), -1, dtype=torch.float64)
    weights, experts = probabilities.float().topk(top_k, -1)
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
    rounded = round_activation(x, layer.gate_up.format).to(layer.gate_up.wide.dtype)
    rows = rounded[torch.div(order, top_k, rounding_mode="floor")]  # [T * k, hidden], grouped by expert
    hit = sum(count > 0 for count in counts)
    grouped = _batched if tokens <= FEW_TOKENS and 2 * hit > layer.num_experts else _looped
    gate_up = grouped(rows, layer.gate_up.wide, counts).float()
    gate, up = gate_up.chunk(2, -1)
    inner = round_activation(F.silu(gate.double()).float() * up, layer.down.format)
    down = grouped(inner.to(layer.down.wide.dtype), layer.down.wide, counts).float()
    spread = torch.empty_like(down)
    spread[order] = down
    return (spread.view(tokens, top_k, -1).double() * weights.double().unsqueeze(-1)).sum(1).to(x.dtype)


def _looped(rows: torch.Tensor, wide: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One product per expert that has tokens. rows: [R, K] grouped by expert; wide: [experts, N, K] -> [R, N]."""
    out = rows.new_empty(rows.shape[0], wide.shape[1])
    low = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(rows[low : low + count], wide[expert].t(), out=out[low : low + count])
            low += count
    return out


def _batched(rows: torch.Tensor, wide: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """One batched product over all experts, each padded to the most tokens that any of them has."""
    most = max(counts)
    slots = [expert * most + j for expert, count in enumerate(counts) for j in range(count)]
    padded = rows.new_zeros(len(counts) * most, rows.shape[1])
    padded[slots] = rows
    return torch.bmm(padded.view(len(counts), most, -1), wide.transpose(1, 2)).flatten(0, 1)[slots]
