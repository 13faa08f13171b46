"""Train the embedded demo model from public-domain books. Three stages, each with its own output folder:

    python scripts/train_demo_model.py prepare --data DIR --out WORK      tokenizer and token arrays (CPU, 3 minutes)
    python scripts/train_demo_model.py train --work WORK --out RUN        training (one GPU, about 8 minutes on an H200)
    python scripts/train_demo_model.py export --work WORK --run RUN --out MODEL    Hugging Face checkpoint folder, bf16

then `llmserve quantize MODEL llmserve/demo --format mxfp8`. DIR holds books.txt.xz.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from demo_model.network import DemoModel, Shape, checkpoint_tensors, hf_config, shape_dict

CHAT_TOKENS = 14_000_000
THINK_SHARE = 0.2


# ---------------------------------------------------------------- prepare


def prepare(arguments: argparse.Namespace) -> None:
    from demo_model.books import load_books
    from demo_model.tokenizer import save_tokenizer, train_tokenizer

    out = Path(arguments.out)
    books = load_books(Path(arguments.data))
    tokenizer = train_tokenizer([book.text for book in books if not book.held_out])
    save_tokenizer(tokenizer, out, Shape().context)
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    arrays: dict[str, np.ndarray] = {}
    train: list[int] = []
    for book, encoding in zip(books, tokenizer.encode_batch([b.text for b in books]), strict=True):
        if book.held_out:
            arrays[f"held_out/{book.title}"] = np.array(encoding.ids, dtype=np.uint16)
            arrays[f"bytes/{book.title}"] = np.array(len(book.text.encode()))
        else:
            train += [*encoding.ids, end_of_text]
    arrays["train"] = np.array(train, dtype=np.uint16)
    arrays |= encode_chats(books, tokenizer)
    np.savez(out / "tokens.npz", **arrays)  # type: ignore[arg-type]
    config = hf_config(Shape(), tokenizer.token_to_id("<|im_end|>"), end_of_text)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    print({name: array.shape for name, array in arrays.items()})


def encode_chats(books: list[Any], tokenizer: Any) -> dict[str, np.ndarray]:
    """Conversations as one token array, a mask of the tokens to learn, and where each conversation starts."""
    from demo_model.chats import ChatMaker

    maker = ChatMaker(books, seed=1)
    tokens: list[int] = []
    learn: list[bool] = []
    starts: list[int] = []
    for system, turns in maker.conversations():
        if len(tokens) >= CHAT_TOKENS:
            break
        starts.append(len(tokens))
        before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        for question, _, answer in turns[:-1]:
            before += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        question, thought, answer = turns[-1]
        before += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if maker.random.random() < THINK_SHARE:
            after = f"<think>\n{thought}\n</think>\n\n{answer}<|im_end|>"
        else:
            before += "<think>\n\n</think>\n\n"
            after = f"{answer}<|im_end|>"
        for text, counted in ((before, False), (after, True), ("\n", False)):
            ids = tokenizer.encode(text).ids
            tokens += ids
            learn += [counted] * len(ids)
    return {
        "chat": np.array(tokens, dtype=np.uint16),
        "chat_learn": np.packbits(np.array(learn, dtype=bool)),
        "chat_starts": np.array(starts, dtype=np.int32),
    }


# ---------------------------------------------------------------- train


class Batches:
    """Random windows of books, and windows of conversations that start at a conversation."""

    def __init__(self, arrays: dict[str, np.ndarray], device: torch.device) -> None:
        self.books = torch.from_numpy(arrays["train"].astype(np.int32)).to(device)
        self.chat = torch.from_numpy(arrays["chat"].astype(np.int32)).to(device)
        learn = np.unpackbits(arrays["chat_learn"])[: len(arrays["chat"])].astype(bool)
        self.learn = torch.from_numpy(learn).to(device)
        starts = arrays["chat_starts"]
        self.starts = torch.from_numpy(starts[starts < len(arrays["chat"]) - 5000]).to(device)
        self.device = device

    def draw(self, rows: int, length: int, chat_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        chat_rows = round(rows * chat_share)
        offsets = torch.arange(length + 1, device=self.device)
        start = torch.randint(len(self.books) - length - 1, (rows - chat_rows, 1), device=self.device)
        tokens = self.books[start + offsets]
        targets = tokens[:, 1:].clone()
        if chat_rows:
            pick = torch.randint(len(self.starts), (chat_rows, 1), device=self.device)
            index = self.starts[pick] + offsets
            chat = self.chat[index]
            tokens = torch.cat((tokens, chat))
            targets = torch.cat((targets, torch.where(self.learn[index[:, 1:]], chat[:, 1:], -100)))
        return tokens[:, :-1].long(), targets.long()


def schedule(progress: float) -> tuple[float, int, float]:
    """(learning-rate factor, window length, share of chat rows) at a share of the training."""
    warm, floor = 0.02, 0.02
    factor = progress / warm if progress < warm else floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if progress < 0.6:
        return factor, 1024, 0.0
    return factor, 4096, 0.25 if progress < 0.85 else 0.5


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    arrays = dict(np.load(Path(arguments.work) / "tokens.npz"))
    batches = Batches(arrays, device)
    model = DemoModel(Shape(), arguments.dropout).to(device)
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": arguments.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    compiled = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    log: list[dict[str, float]] = []
    seen, started = 0, time.monotonic()
    for step in range(arguments.steps):
        factor, length, chat_share = schedule(step / arguments.steps)
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * factor
        tokens, targets = batches.draw(arguments.batch_tokens // length, length, chat_share)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss, mtp_loss, balance, accuracy = compiled(tokens, targets)
            total = loss + 0.3 * mtp_loss + 0.01 * balance
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += tokens.numel()
        late = time.monotonic() - started > arguments.max_seconds
        if (step + 1) % arguments.eval_every == 0 or late:
            held = evaluate(model, arrays, device)["total"]["nats_per_token"]
            row = {
                "step": step + 1,
                "tokens": seen,
                "seconds": time.monotonic() - started,
                "loss": loss.item(),
                "mtp_loss": mtp_loss.item(),
                "balance": balance.item(),
                "accuracy": accuracy.item(),
                "held_out": held,
            }
            log.append(row)
            print({name: round(value, 4) for name, value in row.items()}, flush=True)
            save(model, out)
        if late:
            break
    seconds = time.monotonic() - started
    save(model, out)
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "command": "python scripts/train_demo_model.py " + " ".join(sys.argv[1:]),
        "parameters": sum(p.numel() for p in model.parameters()),
        "shape": shape_dict(model.shape),
        "steps": step + 1,
        "tokens": seen,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(seen / seconds),
        "held_out_bf16_autocast": evaluate(model, arrays, device),
        "log": log,
    }
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "log"}, indent=1))


@torch.no_grad()
def evaluate(model: DemoModel, arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, dict[str, float]]:
    """Held-out loss per book in windows of 1024 tokens, and the MTP layer's share of right first choices."""
    model.eval()
    length, report = 1024, {}
    sums = np.zeros(4)
    for name in [name for name in arrays if name.startswith("held_out/")]:
        tokens = torch.from_numpy(arrays[name].astype(np.int64))[: 64 * length + 1].to(device)
        rows = (len(tokens) - 1) // length
        inputs = tokens[: rows * length].view(rows, length)
        targets = tokens[1 : rows * length + 1].view(rows, length)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            parts = [model(inputs[i : i + 16], targets[i : i + 16]) for i in range(0, rows, 16)]
        weights = np.array([len(inputs[i : i + 16]) for i in range(0, rows, 16)], dtype=float)
        loss = float(np.average([p[0].item() for p in parts], weights=weights))
        accuracy = float(np.average([p[3].item() for p in parts], weights=weights))
        title = name.removeprefix("held_out/")
        bytes_per_token = float(arrays[f"bytes/{title}"]) / len(arrays[name])
        report[title] = _row(loss, bytes_per_token, accuracy)
        sums += np.array([loss, bytes_per_token, accuracy, 1.0]) * rows
    report["total"] = _row(*(sums[:3] / sums[3]))
    model.train()
    return report


def _row(loss: float, bytes_per_token: float, accuracy: float) -> dict[str, float]:
    return {
        "nats_per_token": round(loss, 4),
        "bits_per_byte": round(loss / math.log(2) / bytes_per_token, 4),
        "mtp_top1_accuracy": round(accuracy, 4),
    }


def save(model: DemoModel, out: Path) -> None:
    """bf16 tensors under their published names, in files of at most about 14 MB."""
    from safetensors.torch import save_file

    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in checkpoint_tensors(model).items():
        if size + tensor.nbytes > 14_000_000:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    for index, part in enumerate(parts):
        save_file(part, out / f"part-{index}.safetensors")


# ---------------------------------------------------------------- export


def export(arguments: argparse.Namespace) -> None:
    from safetensors.torch import load_file, save_file

    work, run, out = Path(arguments.work), Path(arguments.run), Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for part in sorted(run.glob("part-*.safetensors")):
        tensors |= load_file(part)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(work / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)
    stage = stages.add_parser("prepare")
    stage.set_defaults(run_stage=prepare)
    stage.add_argument("--data", required=True)
    stage.add_argument("--out", required=True)
    stage = stages.add_parser("train")
    stage.set_defaults(run_stage=train)
    stage.add_argument("--work", required=True)
    stage.add_argument("--out", required=True)
    stage.add_argument("--steps", type=int, default=6000)
    stage.add_argument("--max-seconds", type=float, default=520.0, help="stop early, with what there is")
    stage.add_argument("--eval-every", type=int, default=500, help="steps")
    stage.add_argument("--batch-tokens", type=int, default=65536)
    stage.add_argument("--lr", type=float, default=2e-3)
    stage.add_argument("--weight-decay", type=float, default=0.1)
    stage.add_argument("--dropout", type=float, default=0.1)
    stage.add_argument("--seed", type=int, default=0)
    stage = stages.add_parser("export")
    stage.set_defaults(run_stage=export)
    stage.add_argument("--work", required=True)
    stage.add_argument("--run", required=True)
    stage.add_argument("--out", required=True)
    arguments = parser.parse_args()
    arguments.run_stage(arguments)


if __name__ == "__main__":
    main()
