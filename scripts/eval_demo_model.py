"""Held-out loss of the demo model in each weight format, on the books that training left aside.

    python scripts/eval_demo_model.py --data DIR --bf16 MODEL --out scripts/bench/results/demo_quality.json

DIR holds books.txt.xz; MODEL is the bf16 checkpoint that scripts/train_demo_model.py exports. The quantised ones are
made from it. All runs through llmserve's own operators: quantised formats round weights and activations.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from demo_model.books import load_books

from llmserve.models.batch import ForwardBatch, KVCache
from llmserve.models.checkpoint import load_model
from llmserve.models.quantize import quantize_checkpoint
from llmserve.models.qwen3_moe import Qwen3MoeForCausalLM
from llmserve.text.tokenizer import Tokenizer

WINDOW, PAGE = 1024, 64


@torch.inference_mode()
def window_loss(model: Qwen3MoeForCausalLM, cache: KVCache, tokens: list[int]) -> float:
    """Mean loss in nats of predicting tokens[1:] from those before them."""
    count = len(tokens) - 1
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens[:-1]),
        positions=torch.arange(count),
        slot_mapping=torch.arange(count),
        page_table=torch.arange(-(-count // PAGE), dtype=torch.int32)[None],
        query_start=[0, count],
        seq_lens=[count],
    )
    logits = model.logits(model.forward(batch, cache))
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).item()


def evaluate(folder: Path, books: dict[str, list[int]], windows: int) -> dict[str, float]:
    """Loss per book: the first `windows` windows of each."""
    model = load_model(folder, torch.device("cpu"), torch.float32)
    config = model.config
    pool = torch.zeros(config.num_hidden_layers, WINDOW // PAGE, config.num_key_value_heads, PAGE, config.head_dim)
    cache = KVCache(pool, pool.clone())
    result = {}
    for title, tokens in books.items():
        losses = [window_loss(model, cache, tokens[i * WINDOW : (i + 1) * WINDOW + 1]) for i in range(windows)]
        result[title] = sum(losses) / len(losses)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--bf16", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8, help="windows of 1024 tokens a book (8)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_folder(arguments.bf16)
    held_out = [book for book in load_books(arguments.data) if book.held_out]
    books = {book.title: tokenizer.encode(book.text) for book in held_out}
    bytes_per_token = sum(len(b.text.encode()) for b in held_out) / sum(map(len, books.values()))
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sources = {"bf16": arguments.bf16}
        for format in ("mxfp8", "fp8-block"):
            sources[format] = Path(folder) / format
            quantize_checkpoint(arguments.bf16, sources[format], format, progress=False)
        for name, source in sources.items():
            losses = evaluate(source, books, arguments.windows)
            mean = sum(losses.values()) / len(losses)
            report[name] = {
                "nats_per_token": round(mean, 4),
                "bits_per_byte": round(mean / math.log(2) / bytes_per_token, 4),
                **{title: round(loss, 4) for title, loss in losses.items()},
            }
            print(name, report[name], flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps({"windows_per_book": arguments.windows, **report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
