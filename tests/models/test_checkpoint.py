"""Faulty checkpoints: a start-up error that names the tensor and the file. And the offline quantiser."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmserve.errors import CheckpointError, ConfigError
from llmserve.models.checkpoint import fingerprint, load_model
from llmserve.models.quantize import quantize_checkpoint
from llmserve_kernels.quantize import dequantize_mxfp8

from .checkpoints import GreedyRunner, save_random

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_random(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def quantized(folder: Path, tmp_path: Path) -> Path:
    """The model of `folder` in MXFP8."""
    quantize_checkpoint(folder, tmp_path / "mxfp8", "mxfp8", progress=False)
    return tmp_path / "mxfp8"


def load(folder: Path) -> None:
    load_model(folder, torch.device("cpu"), torch.float32)


def logits_of(folder: Path) -> torch.Tensor:
    runner = GreedyRunner(load_model(folder, torch.device("cpu"), torch.float32), num_pages=8)
    return runner.step({runner.add(): list(range(100, 130))})[0]


def stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """`experts.N.{gate,up,down}_proj.weight` into `experts.gate_up_proj` and `experts.down_proj`."""
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            [tensors.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(8)]
            for kind in ("gate", "up", "down")
        )
        tensors[prefix + "gate_up_proj"] = torch.cat((torch.stack(gate), torch.stack(up)), 1)
        tensors[prefix + "down_proj"] = torch.stack(down)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("name", [Q_PROJ, EXPERT, "lm_head.weight", "model.norm.weight"])
def test_missing_tensor(folder: Path, name: str) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name} is missing.*{folder}"):
        load(folder)


def test_misshapen_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}))
    with pytest.raises(
        CheckpointError, match=rf"{Q_PROJ} in .*model.safetensors has shape \[64, 63\], expected \[64, 64\]"
    ):
        load(folder)


def test_wrong_dtype(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} in .*model.safetensors has dtype torch.int8"):
        load(folder)


def test_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model.safetensors is truncated"):
        load(folder)


def test_missing_shard(tmp_path: Path) -> None:
    save_random(tmp_path, max_shard_size="800KB")
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-0000\d.safetensors is missing: the index names it"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported; supported: Qwen3MoeForCausalLM"),
        ({"num_experts_per_tok": 99}, r"num_experts_per_tok \(99\) must be 1 to num_experts"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a positive integer, got 2.5"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, got 0"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers must be a list of integers, got '1'"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"architectures": None}, "architecture not given is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' is not supported"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"must be \[128, 128\], got None"),
        ({"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 16]}}, r"must be \[1, 32\], got"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
    ],
)
def test_config_that_cannot_be_served(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 2]", "must hold a JSON object, got list"), ("{", "cannot be read as JSON"), ("", "cannot be read as JSON")],
)
def test_config_that_is_no_object(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config.json: {message}"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "no weight_map can be read"),
        ('{"weight_map": []}', "weight_map must map tensor names to file names, got list"),
        ('{"weight_map": {"a": 5}}', "tensor a must be in a file of this folder, got 5"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "tensor a must be in a file of this folder"),
        ('{"weight_map": {"a": "model.safetensors"}}', "tensor a is missing from .*model.safetensors"),
    ],
)
def test_wrong_index(folder: Path, text: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float32, "has dtype torch.float32; scales of mxfp8 weights must be torch.uint8"),
        (torch.int8, "has dtype torch.int8; scales of mxfp8 weights must be torch.uint8"),
    ],
)
def test_scales_of_another_dtype(quantized: Path, dtype: torch.dtype, message: str) -> None:
    """Read as if they were e8m0, they would make a model that runs and talks nonsense."""
    name = Q_PROJ + "_scale"
    change_tensors(quantized, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{name} in .*model.safetensors {message}"):
        load(quantized)


def test_scales_that_are_nan(quantized: Path) -> None:
    name = Q_PROJ + "_scale"
    change_tensors(quantized, lambda tensors: tensors[name][3].fill_(0xFF))
    with pytest.raises(CheckpointError, match=rf"{name} in .* holds scales that are not finite"):
        load(quantized)


def test_scales_may_be_stored_as_e8m0(quantized: Path) -> None:
    before = logits_of(quantized)
    name = Q_PROJ + "_scale"
    change_tensors(quantized, lambda tensors: tensors.update({name: tensors[name].view(torch.float8_e8m0fnu)}))
    assert torch.equal(logits_of(quantized), before)


@pytest.mark.parametrize("name", [Q_PROJ, EXPERT])
def test_weights_multiplied_as_one_must_be_quantised_alike(folder: Path, quantized: Path, name: str) -> None:
    """q, k and v are one product with one rounding of its input, and so are a layer's experts."""
    plain = load_file(folder / "model.safetensors")[name]

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = plain
        del tensors[name + "_scale"]

    change_tensors(quantized, widen)
    with pytest.raises(CheckpointError, match=r"is stored as '.*must be quantised alike"):
        load(quantized)


def test_stacked_experts_and_multi_token_prediction(folder: Path, quantized: Path, tmp_path: Path) -> None:
    """Experts as transformers 5 stacks them are the same model, and quantise to the same.

    `mtp.*` tensors are accepted, not run, and quantised like the layers they resemble.
    """
    stacked = tmp_path / "stacked"
    shutil.copytree(folder, stacked)
    change_tensors(stacked, stack_experts)
    mtp = {
        "mtp.fc.weight": torch.randn(64, 128),
        "mtp.norm.weight": torch.ones(64),
        "mtp.layers.0.self_attn.k_proj.weight": torch.randn(32, 64),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(32, 64),
        "mtp.layers.0.mlp.gate.weight": torch.randn(8, 64),
    }
    change_tensors(stacked, lambda tensors: tensors.update(mtp))
    assert torch.equal(logits_of(stacked), logits_of(folder))
    report = quantize_checkpoint(stacked, tmp_path / "sq", "mxfp8", progress=False)
    assert torch.equal(logits_of(tmp_path / "sq"), logits_of(quantized))
    assert {"mtp.fc", "mtp.k_proj", "mtp.experts.up_proj"} <= set(report.relative_errors())
    after = load_file(tmp_path / "sq" / "model.safetensors")
    for name, tensor in mtp.items():
        kept = "norm" in name or "gate.weight" in name
        assert after[name].dtype == (tensor.dtype if kept else torch.float8_e4m3fn), name


def test_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    save_random(tmp_path / "again")
    save_random(tmp_path / "other", num_experts=4)
    assert fingerprint(folder) == fingerprint(tmp_path / "again") != fingerprint(tmp_path / "other")


@pytest.mark.parametrize("format", ["mxfp8", "fp8-block"])
def test_quantised_model_stays_close(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "m"
    # All experts for every token: no choice of experts that could flip and make a small error a large one.
    save_random(folder, initializer_range=0.05, num_experts_per_tok=8)
    report = quantize_checkpoint(folder, tmp_path / "q", format, progress=False)
    errors = report.relative_errors()
    attention, experts = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert set(errors) == attention | {f"experts.{kind}" for kind in experts}
    assert all(0.005 < error < 0.04 for error in errors.values()), errors  # e4m3 keeps 4 significant bits
    (plain,), (quantised,) = (
        runner.step({runner.add(): list(range(100, 140))})
        for runner in (
            GreedyRunner(load_model(path, torch.device("cpu"), torch.float32)) for path in (folder, tmp_path / "q")
        )
    )
    difference = ((plain - quantised).norm() / plain.norm()).item()
    assert 0.0 < difference < 0.1


def test_quantised_files(folder: Path, tmp_path: Path) -> None:
    """What is quantised, what is not, and that nothing appears before it is complete."""
    quantize_checkpoint(folder, tmp_path / "q", "mxfp8", progress=False)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "q" / "model.safetensors")
    assert after[Q_PROJ].dtype == torch.float8_e4m3fn
    assert after[Q_PROJ + "_scale"].dtype == torch.uint8
    restored = dequantize_mxfp8(after[Q_PROJ], after[Q_PROJ + "_scale"])
    assert (restored - before[Q_PROJ]).abs().max() <= before[Q_PROJ].abs().max() / 16
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        assert torch.equal(after[name], before[name])
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp8"
    with pytest.raises(ConfigError, match="exists already"):
        quantize_checkpoint(folder, tmp_path / "q", "mxfp8", progress=False)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "qq", "fp8-block", progress=False)


def test_failed_quantisation_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """B104 and K tails: 48 columns do not divide into MX blocks of 32, and the error says which tensor."""
    change_tensors(folder, lambda tensors: tensors.update({EXPERT: torch.zeros(64, 48)}))
    with pytest.raises(CheckpointError, match=rf"{EXPERT} has 48 columns; MXFP8 needs a multiple of 32"):
        quantize_checkpoint(folder, tmp_path / "q", "mxfp8", progress=False)
    assert not (tmp_path / "q").exists()
    assert not list(tmp_path.glob(".q*"))


def test_block_fp8_edges_need_not_divide(tmp_path: Path) -> None:
    """B104: 1536 / 8 = 192 is no multiple of 128; ragged blocks are blocks of their own."""
    save_random(tmp_path / "m", hidden_size=192, moe_intermediate_size=96)
    quantize_checkpoint(tmp_path / "m", tmp_path / "q", "fp8-block", progress=False)
    scale = load_file(tmp_path / "q" / "model.safetensors")["model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"]
    assert scale.shape == (1, 2)
    load(tmp_path / "q")
