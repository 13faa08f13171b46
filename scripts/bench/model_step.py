"""Time of one model step on a CPU: decode of 1 and 8 sequences, and a prefill, on a random model of the demo's shape.

.venv/bin/python scripts/bench/model_step.py --threads 1 --format mxfp8
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from llmserve.models.batch import ForwardBatch, KVCache
from llmserve.models.checkpoint import load_model
from llmserve.models.config import Qwen3MoeConfig
from llmserve.models.quantize import quantize_checkpoint
from llmserve.models.qwen3_moe import Qwen3MoeForCausalLM

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PAGE_SIZE = 64


def save_random_checkpoint(folder: Path) -> None:
    """Weights of about the size that trained ones have, so that routing spreads over the experts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = Qwen3MoeConfig.from_folder(folder)
    hidden, inner, dim = config.hidden_size, config.moe_intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "mlp.gate": (config.num_experts, hidden),
    }
    for expert in range(config.num_experts):
        for kind in ("gate", "up"):
            shapes[f"mlp.experts.{expert}.{kind}_proj"] = (inner, hidden)
        shapes[f"mlp.experts.{expert}.down_proj"] = (hidden, inner)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    tensors = {
        "model.embed_tokens.weight": torch.randn(config.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = torch.randn(shape) * shape[-1] ** -0.5
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = torch.ones(size)
    save_file(tensors, folder / "model.safetensors")


def make_batch(sequences: int, cached: int, new: int, vocab_size: int) -> ForwardBatch:
    """`new` tokens for each of `sequences` that have `cached` tokens already, each with pages of its own."""
    length = cached + new
    pages = -(-length // PAGE_SIZE)
    positions = torch.arange(cached, length).repeat(sequences)
    first_slot = torch.arange(sequences).repeat_interleave(new) * pages * PAGE_SIZE
    return ForwardBatch(
        token_ids=torch.randint(vocab_size, (sequences * new,)),
        positions=positions,
        slot_mapping=first_slot + positions,
        page_table=torch.arange(sequences * pages, dtype=torch.int32).view(sequences, pages),
        query_start=[s * new for s in range(sequences + 1)],
        seq_lens=[length] * sequences,
    )


def median_ms(step: Callable[[], None], repeats: int) -> float:
    """Median over `repeats` calls, after a few that are not counted."""
    times: list[float] = []
    for call in range(repeats + 3):
        start = time.perf_counter()
        step()
        if call >= 3:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


@torch.inference_mode()
def measure(model: Qwen3MoeForCausalLM, context: int, prompt: int, repeats: int) -> dict[str, float]:
    """Milliseconds by case: decode steps with their logits, and a prefill without cached tokens."""
    config = model.config
    cases = {f"decode, batch {size}, context {context}": (size, context - 1, 1) for size in (1, 8)}
    cases[f"prefill of {prompt}"] = (1, 0, prompt)
    num_pages = max(size * -(-(cached + new) // PAGE_SIZE) for size, cached, new in cases.values())
    shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, PAGE_SIZE, config.head_dim)
    cache = KVCache(torch.randn(shape), torch.randn(shape))
    results: dict[str, float] = {}
    for name, (size, cached, new) in cases.items():
        batch = make_batch(size, cached, new, config.vocab_size)
        last = torch.tensor(batch.query_start[1:]) - 1

        def step(batch: ForwardBatch = batch, last: torch.Tensor = last) -> None:
            model.logits(model.forward(batch, cache)[last])

        results[name] = median_ms(step, repeats if new == 1 else max(3, repeats // 10))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("none", "mxfp8", "fp8-block"), default="mxfp8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache of each decoding sequence")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--repeats", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "plain"
        save_random_checkpoint(folder)
        if arguments.format != "none":
            quantize_checkpoint(folder, folder := Path(temporary) / "quantized", arguments.format, progress=False)
        model = load_model(folder, torch.device("cpu"), torch.float32)
    print(f"{arguments.format}, {arguments.threads} thread(s), median of {arguments.repeats} decode steps")
    for name, milliseconds in measure(model, arguments.context, arguments.prompt, arguments.repeats).items():
        print(f"  {name:32} {milliseconds:8.2f} ms")


if __name__ == "__main__":
    main()
