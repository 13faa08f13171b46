"""Load a Hugging Face checkpoint folder into a model that runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from llmserve.errors import CheckpointError
from llmserve.models.config import Qwen3MoeConfig
from llmserve.models.qwen3_moe import (
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    Qwen3MoeForCausalLM,
    SparseWeights,
)
from llmserve.models.safetensors_folder import SafetensorsFolder
from llmserve_kernels.linear import LinearWeight, widen_weight
from llmserve_kernels.moe import ExpertWeights
from llmserve_kernels.quantize import FP8_BLOCK, MX_BLOCK

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_SUFFIX = {"mxfp8": "_scale", "fp8-block": "_scale_inv"}


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """Read, check and widen all tensors. `dtype`: of activations.

    Raises CheckpointError that names the tensor and the file. `mtp.*` tensors are left unread: speculation is not
    part of this model yet.
    """
    config = Qwen3MoeConfig.from_folder(folder)
    with SafetensorsFolder(folder) as tensors:
        return Qwen3MoeForCausalLM(config, _Loader(config, tensors, device, dtype).load())


def fingerprint(folder: Path) -> str:
    """Equal for equal checkpoints, whatever the folder is called: config, and name, shape and dtype of each tensor."""
    digest = hashlib.blake2b(digest_size=16)
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    with SafetensorsFolder(folder) as tensors:
        for name in sorted(tensors.names()):
            digest.update(f"{name}{tensors.shape(name)}".encode())
        for file in tensors.file_names():
            digest.update(str((folder / file).stat().st_size).encode())
    return digest.hexdigest()


class _Loader:
    """Knows the names of the tensors and the shapes that the config demands."""

    def __init__(
        self, config: Qwen3MoeConfig, tensors: SafetensorsFolder, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.tensors = tensors
        self.device = device
        self.dtype = dtype

    def load(self) -> ModelWeights:
        config = self.config
        size = (config.vocab_size, config.hidden_size)
        embedding = self._plain("model.embed_tokens.weight", size)
        head = embedding if config.tie_word_embeddings else self._plain("lm_head.weight", size)
        return ModelWeights(
            embedding=embedding.to(self.dtype),
            layers=[self._layer(index) for index in range(config.num_hidden_layers)],
            norm=self._norm("model.norm.weight", config.hidden_size),
            head=LinearWeight(head.float().t()),  # tied: a view of the embedding; BLAS likes this large one so as well
        )

    def _layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}."
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        attention = prefix + "self_attn."
        projections = [
            self._linear(f"{attention}{name}_proj.weight", count * dim, hidden)
            for name, count in (("q", heads), ("k", config.num_key_value_heads), ("v", config.num_key_value_heads))
        ]
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight", hidden),
            attention=AttentionWeights(
                qkv=LinearWeight(_transposed(torch.cat([wide for wide, _ in projections])), projections[0][1]),
                out=self._transposed_linear(attention + "o_proj.weight", hidden, heads * dim),
                qk_norm=self._qk_norm(attention, dim),
            ),
            post_norm=self._norm(prefix + "post_attention_layernorm.weight", hidden),
            mlp=self._mlp(index, prefix + "mlp."),
        )

    def _mlp(self, index: int, prefix: str) -> SparseWeights | ExpertWeights:
        config = self.config
        if not config.is_sparse(index):
            return self._experts([prefix], config.intermediate_size)
        router = self._plain(prefix + "gate.weight", (config.num_experts, config.hidden_size))
        if f"{prefix}experts.gate_up_proj" in self.tensors:
            experts = self._fused_experts(prefix + "experts.")
        else:
            names = [f"{prefix}experts.{expert}." for expert in range(config.num_experts)]
            experts = self._experts(names, config.moe_intermediate_size)
        return SparseWeights(_transposed(router), experts)

    def _experts(self, prefixes: list[str], inner: int) -> ExpertWeights:
        """Experts stored one by one under `gate_proj`, `up_proj`, `down_proj` (the published layout)."""
        hidden, count = self.config.hidden_size, len(prefixes)
        gate_up = torch.empty(count, hidden, 2 * inner, device=self.device)
        down = torch.empty(count, inner, hidden, device=self.device)
        format = "none"
        for expert, prefix in enumerate(prefixes):
            gate, format = self._linear(prefix + "gate_proj.weight", inner, hidden)
            gate_up[expert, :, :inner] = gate.t()
            gate_up[expert, :, inner:] = self._linear(prefix + "up_proj.weight", inner, hidden)[0].t()
            down[expert] = self._linear(prefix + "down_proj.weight", hidden, inner)[0].t()
        return ExpertWeights(LinearWeight(gate_up, format), LinearWeight(down, format))

    def _fused_experts(self, prefix: str) -> ExpertWeights:
        """Experts stored as two stacked tensors, as transformers 5 holds them in memory (not quantised)."""
        config = self.config
        experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        gate_up = self._plain(prefix + "gate_up_proj", (experts, 2 * inner, hidden))
        down = self._plain(prefix + "down_proj", (experts, hidden, inner))
        return ExpertWeights(LinearWeight(_transposed(gate_up)), LinearWeight(_transposed(down)))

    def _transposed_linear(self, name: str, rows: int, columns: int) -> LinearWeight:
        wide, format = self._linear(name, rows, columns)
        return LinearWeight(_transposed(wide), format)

    def _linear(self, name: str, rows: int, columns: int) -> tuple[torch.Tensor, str]:
        """A projection [rows, columns] widened to float32, and its format: a checkpoint may leave some unquantised."""
        weight = self.tensors.get(name, (rows, columns))
        if weight.dtype in FLOAT_DTYPES:
            return widen_weight(weight.to(self.device), None, "none"), "none"
        format = self.config.quant_format
        if weight.dtype != torch.float8_e4m3fn or format == "none":
            raise CheckpointError(
                f"tensor {name} in {self.tensors.where(name)} has dtype {weight.dtype}, which does not fit the "
                f"quantization_config of config.json ({format})"
            )
        scale = self.tensors.get(name + SCALE_SUFFIX[format], self._scale_shape(format, name, rows, columns))
        return widen_weight(weight.to(self.device), scale.to(self.device), format), format

    def _scale_shape(self, format: str, name: str, rows: int, columns: int) -> tuple[int, int]:
        if format == "fp8-block":
            return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
        if columns % MX_BLOCK:
            raise CheckpointError(
                f"tensor {name} in {self.tensors.where(name)} has {columns} columns; "
                f"MXFP8 needs a multiple of {MX_BLOCK}"
            )
        return rows, columns // MX_BLOCK

    def _plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor that is never quantised."""
        tensor = self.tensors.get(name, shape)
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {name} in {self.tensors.where(name)} has dtype {tensor.dtype}; "
                "embeddings, routers, norms and the head must be bfloat16, float16 or float32"
            )
        return tensor.to(self.device)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self._plain(name, (size,)).float()

    def _qk_norm(self, prefix: str, dim: int) -> torch.Tensor:
        """One row per head: query heads, then key heads."""
        q = self._norm(prefix + "q_norm.weight", dim).expand(self.config.num_attention_heads, dim)
        k = self._norm(prefix + "k_norm.weight", dim).expand(self.config.num_key_value_heads, dim)
        return torch.cat((q, k))


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    """[..., N, K] -> contiguous float32 [..., K, N]."""
    return weight.float().transpose(-1, -2).contiguous()
