"""The demo model for training: a Qwen3-MoE of 6 layers with one MTP layer, written so that a GPU runs it fast.

All experts of a layer are computed for every token as one wide MLP whose hidden units are scaled by the routing weights
(zero for experts not chosen): four times the arithmetic of a sparse layer, but two large GEMMs and no sorting.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Shape:
    vocab: int = 8192
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    experts: int = 16
    top_k: int = 4
    expert_hidden: int = 128
    rope_theta: float = 10000.0
    eps: float = 1e-6
    context: int = 4096


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        head = self.shape.head_dim
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, head)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return (x.float() * cos + torch.cat((-right, left), -1).float() * sin).to(x.dtype)


class Experts(nn.Module):
    """gate_up: [hidden, experts * 2 * expert_hidden] as gate then up; down: [experts * expert_hidden, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        wide = shape.experts * shape.expert_hidden
        self.gate = nn.Linear(shape.hidden, wide, bias=False)
        self.up = nn.Linear(shape.hidden, wide, bias=False)
        self.down = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.router.weight).softmax(-1)
        top, chosen = probabilities.topk(shape.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, chosen, top)
        used = (weights > 0).float().mean((0, 1))
        balance = shape.experts * (used / shape.top_k * probabilities.mean((0, 1))).sum()
        inner = F.silu(self.gate(x)) * self.up(x)
        inner = inner.unflatten(-1, (shape.experts, shape.expert_hidden)) * weights.to(inner.dtype).unsqueeze(-1)
        return self.down(inner.flatten(-2)), balance


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = Experts(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + self.dropout(out), balance


class MTP(nn.Module):
    """Predicts token t + 2 from the hidden state of t and the embedding of token t + 1."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden = RMSNorm(shape.hidden, shape.eps)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, dropout)])
        self.norm = RMSNorm(shape.hidden, shape.eps)

    def forward(self, hidden: torch.Tensor, following: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        x = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), -1)
        x, balance = self.layers[0](self.fc(x), cos, sin)
        return self.norm(x), balance


class DemoModel(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, dropout) for _ in range(shape.layers)])
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self.mtp = MTP(shape, dropout)
        self.dropout = nn.Dropout(dropout)
        inverse = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.context).float()[:, None] * inverse
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / (2 * shape.layers) ** 0.5 if name.endswith(("o_proj.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale * 1.5)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens, targets: [batch, length]; a target of -100 does not count.

        Returns the mean loss of the next token, that of the MTP layer, the balance loss, and the share of positions at
        which the MTP layer's first choice is right.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        embedded = self.embed_tokens(tokens)
        x = self.dropout(embedded)
        balance = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, one = layer(x, cos, sin)
            balance = balance + one
        hidden = self.norm(x)
        loss = self._loss(hidden, targets)
        drafted, one = self.mtp(hidden[:, :-1], embedded[:, 1:], cos[:-1], sin[:-1])
        mtp_loss = self._loss(drafted, targets[:, 1:])
        with torch.no_grad():
            right = (F.linear(drafted, self.embed_tokens.weight).argmax(-1) == targets[:, 1:]).float()
            accuracy = right.sum() / (targets[:, 1:] >= 0).float().sum()
        return loss, mtp_loss, (balance + one) / (len(self.layers) + 1), accuracy

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def checkpoint_tensors(model: DemoModel) -> dict[str, torch.Tensor]:
    """The weights under the names of published Qwen3-MoE checkpoints (and `mtp.*` as in Qwen3.5's)."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("_orig_mod.")
        prefix = "" if name.startswith("mtp.") else "model."
        base, _, leaf = name.rpartition(".mlp.")
        if leaf == "router.weight":
            out[f"{prefix}{base}.mlp.gate.weight"] = tensor
        elif leaf in ("gate.weight", "up.weight", "down.weight"):
            kind = leaf.split(".")[0] + "_proj.weight"
            dim = 1 if leaf == "down.weight" else 0
            for expert, part in enumerate(tensor.chunk(model.shape.experts, dim)):
                out[f"{prefix}{base}.mlp.experts.{expert}.{kind}"] = part
        else:
            out[prefix + name] = tensor
    return {name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in out.items()}


def hf_config(shape: Shape, end: int, pad: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.eps,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "bfloat16",
    }


def shape_dict(shape: Shape) -> dict[str, object]:
    return asdict(shape)
