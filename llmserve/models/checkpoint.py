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
from llmserve_kernels.quantize import E8M0_NAN, FP8_BLOCK, MX_BLOCK

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_DTYPES = {"mxfp8": (torch.uint8,), "fp8-block": FLOAT_DTYPES}  # float8_e8m0fnu is read as the bytes it is
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
        qkv = {
            f"{attention}{name}_proj.weight": count * dim
            for name, count in (("q", heads), ("k", config.num_key_value_heads), ("v", config.num_key_value_heads))
        }
        projections = [self._linear(name, rows, hidden) for name, rows in qkv.items()]
        qkv_format = self._one_format(dict(zip(qkv, (format for _, format in projections), strict=True)))
        return LayerWeights(
            input_norm=self._norm(prefix + "input_layernorm.weight", hidden),
            attention=AttentionWeights(
                qkv=LinearWeight(_transposed(torch.cat([wide for wide, _ in projections])), qkv_format),
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
        gate_up_formats: dict[str, str] = {}
        down_formats: dict[str, str] = {}
        for expert, prefix in enumerate(prefixes):
            for name, low in ((prefix + "gate_proj.weight", 0), (prefix + "up_proj.weight", inner)):
                wide, gate_up_formats[name] = self._linear(name, inner, hidden)
                gate_up[expert, :, low : low + inner] = wide.t()
            wide, down_formats[prefix + "down_proj.weight"] = self._linear(prefix + "down_proj.weight", hidden, inner)
            down[expert] = wide.t()
        return ExpertWeights(
            LinearWeight(gate_up, self._one_format(gate_up_formats)), LinearWeight(down, self._one_format(down_formats))
        )

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
        scale = self._scale(name + SCALE_SUFFIX[format], format, self._scale_shape(format, name, rows, columns))
        return widen_weight(weight.to(self.device), scale.to(self.device), format), format

    def _one_format(self, formats: dict[str, str]) -> str:
        """The format of weights that are multiplied as one, their input being rounded once for all. By tensor name."""
        (first, format), *others = formats.items()
        for name, other in others:
            if other != format:
                raise CheckpointError(
                    f"tensor {name} in {self.tensors.where(name)} is stored as {other!r}, {first} as {format!r}; q, k "
                    "and v, and the same projections of all experts of a layer, must be quantised alike"
                )
        return format

    def _scale(self, name: str, format: str, shape: tuple[int, int]) -> torch.Tensor:
        """Scales of a quantised weight: e8m0 as bytes (mxfp8), or floats (fp8-block)."""
        scale = self.tensors.get(name, shape)
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        if scale.dtype not in SCALE_DTYPES[format]:
            raise CheckpointError(
                f"tensor {name} in {self.tensors.where(name)} has dtype {scale.dtype}; scales of {format} weights "
                f"must be {' or '.join(map(str, SCALE_DTYPES[format]))}"
            )
        finite = scale != E8M0_NAN if format == "mxfp8" else scale.isfinite()
        if not finite.all():
            raise CheckpointError(f"tensor {name} in {self.tensors.where(name)} holds scales that are not finite")
        return scale

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
