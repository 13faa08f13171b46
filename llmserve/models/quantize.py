"""`llmserve quantize`: convert a checkpoint to MXFP8 or block FP8, offline, one tensor at a time."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file

from llmserve.errors import CheckpointError, ConfigError
from llmserve.models.config import Qwen3MoeConfig
from llmserve.models.safetensors_folder import INDEX, SafetensorsFolder
from llmserve_kernels.quantize import (
    MX_BLOCK,
    dequantize_block_fp8_weight,
    dequantize_mxfp8,
    quantize_block_fp8_weight,
    quantize_mxfp8,
)

QUANTIZED = re.compile(
    r"(?:self_attn\.(?:q|k|v|o)_proj|mlp(?:\.experts\.\d+)?\.(?:gate|up|down)_proj|mtp\.fc)\.weight$"
)
FUSED_EXPERTS = re.compile(r"mlp\.experts\.(?:gate_up|down)_proj$")
UNQUANTIZED_MODULES = ["lm_head", "model.embed_tokens", "mlp.gate", "norm"]
CONFIG_BY_FORMAT: dict[str, dict[str, Any]] = {
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, MX_BLOCK], "scale_fmt": "e8m0"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
}


@dataclass(slots=True)
class QuantizationReport:
    """Sums over all tensors of a kind (q_proj, ..., experts.down_proj)."""

    format: str
    error_square: dict[str, float] = field(default_factory=dict)
    norm_square: dict[str, float] = field(default_factory=dict)
    source_bytes: int = 0
    result_bytes: int = 0

    def add(self, kind: str, weight: torch.Tensor, restored: torch.Tensor) -> None:
        difference = (restored - weight.float()).square().sum().item()
        self.error_square[kind] = self.error_square.get(kind, 0.0) + difference
        self.norm_square[kind] = self.norm_square.get(kind, 0.0) + weight.float().square().sum().item()

    def relative_errors(self) -> dict[str, float]:
        """Root of the summed squared error over the root of the summed squares, by kind."""
        return {
            kind: (error / self.norm_square[kind]) ** 0.5 if self.norm_square[kind] else 0.0
            for kind, error in sorted(self.error_square.items())
        }

    def print(self, console: Console) -> None:
        table = Table("tensor kind", f"relative error ({self.format})", box=None)
        for kind, error in self.relative_errors().items():
            table.add_row(kind, f"{error:.4%}")
        console.print(table)
        console.print(f"{self.source_bytes / 2**20:.1f} MiB -> {self.result_bytes / 2**20:.1f} MiB")


def quantize_checkpoint(
    source: str | Path, destination: str | Path, format: str, *, progress: bool = True
) -> QuantizationReport:
    """Convert SRC to DST, shard by shard: in memory is one tensor at a time and one shard of results.

    DST appears only when it is complete: it is written beside its final place and renamed. Raises ConfigError for an
    unknown format or an existing DST, CheckpointError for a wrong source.
    """
    source, destination = Path(source), Path(destination)
    if format not in CONFIG_BY_FORMAT:
        raise ConfigError(f"format must be one of {', '.join(CONFIG_BY_FORMAT)}, got {format!r}")
    if destination.exists():
        raise ConfigError(f"{destination} exists already: choose another name or remove it")
    config = Qwen3MoeConfig.from_folder(source)
    if config.quant_format != "none":
        raise CheckpointError(f"{source} is quantised already ({config.quant_format}): start from the bf16 checkpoint")
    work = destination.with_name(f".{destination.name}.partial-{uuid.uuid4().hex[:8]}")
    work.mkdir(parents=True)
    try:
        report = _convert(source, work, format, progress)
        _copy_other_files(source, work, format)
        work.rename(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if progress:
        report.print(Console(stderr=True))
    return report


def _convert(source: Path, work: Path, format: str, progress: bool) -> QuantizationReport:
    report = QuantizationReport(format)
    weight_map: dict[str, str] = {}
    with SafetensorsFolder(source) as tensors, Progress(disable=not progress, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"quantising to {format}", total=len(list(tensors.names())))
        for file in tensors.file_names():
            shard: dict[str, torch.Tensor] = {}
            for name in [name for name, where in tensors.files.items() if where == file]:
                for stored_name, weight in _per_expert(name, tensors.get(name)):
                    shard |= _quantize(stored_name, weight, format, report)
                bar.advance(task)
            save_file(shard, work / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": report.result_bytes}, "weight_map": weight_map}
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return report


def _per_expert(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Stacked experts are written one by one, as published checkpoints have them."""
    if not FUSED_EXPERTS.search(name):
        return [(name, tensor)]
    prefix, kind = name.rsplit(".", 1)
    parts: list[tuple[str, torch.Tensor]] = []
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            parts.append((f"{prefix}.{expert}.down_proj.weight", weight.contiguous()))
        else:
            gate, up = weight.chunk(2)
            parts.append((f"{prefix}.{expert}.gate_proj.weight", gate.contiguous()))
            parts.append((f"{prefix}.{expert}.up_proj.weight", up.contiguous()))
    return parts


def _quantize(name: str, weight: torch.Tensor, format: str, report: QuantizationReport) -> dict[str, torch.Tensor]:
    report.source_bytes += weight.nbytes
    if not QUANTIZED.search(name):
        result = {name: weight}
    elif format == "mxfp8":
        if weight.shape[-1] % MX_BLOCK:
            raise CheckpointError(f"tensor {name} has {weight.shape[-1]} columns; MXFP8 needs a multiple of {MX_BLOCK}")
        values, scale = quantize_mxfp8(weight)
        report.add(tensor_kind(name), weight, dequantize_mxfp8(values, scale))
        result = {name: values, name + "_scale": scale}
    else:
        values, scale = quantize_block_fp8_weight(weight)
        report.add(tensor_kind(name), weight, dequantize_block_fp8_weight(values, scale))
        result = {name: values, name + "_scale_inv": scale}
    report.result_bytes += sum(tensor.nbytes for tensor in result.values())
    return result


def tensor_kind(name: str) -> str:
    """`model.layers.3.mlp.experts.7.up_proj.weight` -> `experts.up_proj`."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if ".experts." in name:
        kind = f"experts.{kind}"
    return f"mtp.{kind}" if name.startswith("mtp.") else kind


def _copy_other_files(source: Path, work: Path, format: str) -> None:
    """Tokenizer, templates and the rest as they are; config.json with the quantization_config."""
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copy(path, work / path.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        **CONFIG_BY_FORMAT[format],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": UNQUANTIZED_MODULES,
    }
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
