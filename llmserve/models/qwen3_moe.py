"""Qwen3-MoE on paged KV: QK-norm, grouped-query attention with RoPE, sparse experts (or dense layers)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from llmserve.models.batch import ForwardBatch, KVCache
from llmserve.models.config import Qwen3MoeConfig
from llmserve_kernels.attention import paged_attention
from llmserve_kernels.linear import LinearWeight, linear
from llmserve_kernels.moe import ExpertWeights, fused_experts, route
from llmserve_kernels.norm import rms_norm
from llmserve_kernels.rope import KVSlots, apply_rope, rope_table, write_kv


@dataclass(slots=True)
class AttentionWeights:
    qkv: LinearWeight  # [hidden, (heads + 2 * kv_heads) * head_dim]: q, k, v columns
    out: LinearWeight  # [heads * head_dim, hidden]
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim]: the norm's weight of each query and key head


@dataclass(slots=True)
class SparseWeights:
    router: torch.Tensor  # [hidden, experts]
    experts: ExpertWeights


@dataclass(slots=True)
class LayerWeights:
    input_norm: torch.Tensor
    attention: AttentionWeights
    post_norm: torch.Tensor
    mlp: SparseWeights | ExpertWeights  # a dense layer is one expert that every token takes


@dataclass(slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab, hidden] in the compute dtype
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: LinearWeight  # [hidden, vocab]


class Qwen3MoeForCausalLM:
    """The model of one rank. `forward` computes hidden states, `logits` those of chosen rows."""

    def __init__(self, config: Qwen3MoeConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        device = weights.embedding.device
        cos, sin = rope_table(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden].

        `on_layer(i)` is called as soon as layer i's keys and values of all new tokens are in the cache: a hand-off
        posts its page writes there.
        """
        config = self.config
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        slots = KVSlots.of(batch.slot_mapping, kv_cache.page_size)
        x = self.weights.embedding[batch.token_ids]
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
            q, k, v = self._qkv(normed, layer.attention, cos, sin)
            write_kv(k, v, kv_cache.k[index], kv_cache.v[index], slots)
            if on_layer is not None:
                on_layer(index)
            attended = paged_attention(
                q,
                kv_cache.k[index],
                kv_cache.v[index],
                batch.page_table,
                batch.query_start,
                batch.seq_lens,
                config.head_dim**-0.5,
            )
            x = x + linear(attended.flatten(1), layer.attention.out)
            x = x + self._mlp(rms_norm(x, layer.post_norm, config.rms_norm_eps), layer.mlp)
        return rms_norm(x, self.weights.norm, config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden] -> [R, vocab] float32."""
        return linear(hidden, self.weights.head).float()

    def _qkv(
        self, x: torch.Tensor, weights: AttentionWeights, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = linear(x, weights.qkv).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], 1)
        q, k = apply_rope(rms_norm(qk, weights.qk_norm, config.rms_norm_eps), cos, sin).split([heads, kv_heads], 1)
        return q, k, v

    def _mlp(self, x: torch.Tensor, weights: SparseWeights | ExpertWeights) -> torch.Tensor:
        if isinstance(weights, SparseWeights):
            chosen, experts = route(x, weights.router, self.config.num_experts_per_tok, self.config.norm_topk_prob)
            return fused_experts(x, chosen, experts, weights.experts)
        ones = x.new_ones(x.shape[0], 1, dtype=torch.float32)
        return fused_experts(x, ones, torch.zeros_like(ones, dtype=torch.int64), weights)
