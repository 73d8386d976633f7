"""Train a byte-level GPT on source code: an ordinary LightningModule, split over tensor and pipeline ranks by name.

    python examples/train_gpt.py                            # CPU processes, or every GPU there is
    python examples/train_gpt.py --strategy ddp --devices 2
    python examples/train_gpt.py --data my_texts/ --max-steps 2000

The text is the standard library that came with this Python, unless --data names files or folders. At the end a process
of its own, with a plain Trainer on one device, loads the checkpoint and must find the same validation loss.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.n_head = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Transformer(nn.Module):
    """Bytes (B, T) to logits (B, T, 256) of the byte that follows each."""

    def __init__(self, layers: int, heads: int, width: int, context: int, dropout: float, tie_head: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, width)
        self.pos = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        if tie_head:
            self.head.weight = self.tok.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, bytes_in: Tensor) -> Tensor:
        positions = torch.arange(bytes_in.size(1), device=bytes_in.device)
        x = self.drop(self.tok(bytes_in) + self.pos(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class GPT(LightningModule):
    """A language model over bytes; logs `train_loss`, `val_loss` (nats per byte) and `val_bpb` (bits per byte)."""

    def __init__(
        self,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        context: int = 64,
        dropout: float = 0.0,
        tie_head: bool = False,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Transformer(layers, heads, width, context, dropout, tie_head)

    def forward(self, bytes_in: Tensor) -> Tensor:
        return self.model(bytes_in)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        bytes_in, targets = batch
        return F.cross_entropy(self(bytes_in).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bpb", loss / math.log(2), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, steps // 10)

        def scale(step: int) -> float:
            """Linear warm-up over a tenth of the run, then a cosine to a tenth of the rate."""
            if step < warmup:
                return (step + 1) / warmup
            return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
        """Continue `prompt` by `length` sampled bytes."""
        text = torch.tensor(list(prompt), device=self.device)[None]
        for _ in range(length):
            logits = self(text[:, -self.hparams["context"] :])[:, -1]
            text = torch.cat([text, torch.multinomial((logits / temperature).softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Text cut into windows of `context` bytes, each with the same window one byte later as its targets."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


class ByteData(LightningDataModule):
    """Files, or the files in folders, one after the other; every sixteenth part is kept for validation."""

    def __init__(
        self,
        data: Sequence[str] = (),
        context: int = 64,
        batch_size: int = 16,
        max_bytes: int = 4_000_000,
        max_val_bytes: int = 32_769,
    ) -> None:
        super().__init__()
        self.paths = [Path(path) for path in data]
        self.context = context
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.max_val_bytes = max_val_bytes

    def setup(self, stage: str) -> None:
        text = read_text(self.paths or standard_library(), self.max_bytes)
        num_val = min(len(text) // 16, self.max_val_bytes)
        if num_val <= self.context:
            least = self.context + 1
            raise ValueError(
                f"a context of {self.context} needs {16 * least} bytes of text or more, got {len(text)}, and {least} "
                f"of them for validation, where max_val_bytes={self.max_val_bytes}"
            )
        self.train = Windows(text[:-num_val], self.context)
        self.val = Windows(text[-num_val:], self.context)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=4 * self.batch_size)  # without gradients there is room for more


def standard_library() -> list[Path]:
    """Source files that every Python installation carries."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read_text(paths: Sequence[Path], max_bytes: int) -> bytes:
    """At most `max_bytes` of the files and of all files inside the folders, in a fixed order."""
    text = bytearray()
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if len(text) < max_bytes and (file.is_file() or file == path):
                text += file.read_bytes()[: max_bytes - len(text)]
    return bytes(text)


def train(args: argparse.Namespace) -> None:
    import lightning_parallel  # noqa: F401 - makes "tp_pp", "tp" and "pp" known to the Trainer

    seed_everything(args.seed)
    data = ByteData(args.data, args.context, args.batch_size)
    module = GPT(args.layers, args.heads, args.width, args.context, args.dropout, args.tie_head, args.lr)
    best = ModelCheckpoint(Path(args.out) / "checkpoints", filename="gpt-{step}-{val_bpb:.3f}", monitor="val_bpb")
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        precision=args.precision,
        max_steps=args.max_steps,
        val_check_interval=min(args.val_every, args.max_steps),
        check_val_every_n_epoch=None,
        log_every_n_steps=10,
        gradient_clip_val=1.0,
        callbacks=[best, LearningRateMonitor("step")],
        default_root_dir=args.out,
    )
    trainer.fit(module, data)
    (metrics,) = trainer.validate(module, data, ckpt_path="best")
    if trainer.is_global_zero:
        print(f"\nTrained with {args.strategy} on {trainer.world_size} devices.")
        print(f"Checkpoint: {best.best_model_path}", flush=True)
        verify_in_new_process(args, best.best_model_path, metrics["val_loss"])


def verify_in_new_process(args: argparse.Namespace, checkpoint: str, loss: float) -> None:
    """Run `verify` in a fresh interpreter that takes no part in the distributed run."""
    data = ["--data", *args.data] if args.data else []
    sizes = ["--context", str(args.context), "--batch-size", str(args.batch_size)]
    command = [sys.executable, __file__, "--verify", checkpoint, "--expect", repr(loss), *data, *sizes]
    launcher = ("RANK", "LOCAL_", "NODE_RANK", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    sys.exit(subprocess.run(command, env=clean, check=False).returncode)


def verify(args: argparse.Namespace) -> None:
    """Load the checkpoint without this package, in one process on one device, and compare the validation loss."""
    seed_everything(args.seed, verbose=False)
    module = GPT.load_from_checkpoint(args.verify)
    trainer = Trainer(devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False)
    (metrics,) = trainer.validate(module, ByteData(args.data, args.context, args.batch_size), verbose=False)
    loss = metrics["val_loss"]
    sample = module.eval().generate(b"def ", 400).decode(errors="replace")
    print(f"\nA sample of what it writes:\n\n{sample}\n")
    print(f"validation, bits per byte:                {metrics['val_bpb']:.4f}")
    print(f"validation loss in the parallel run:      {args.expect:.8f}")
    print(f"validation loss of a plain Trainer:       {loss:.8f}")
    print(f"difference:                               {abs(loss - args.expect):.1e}")
    if not abs(loss - args.expect) <= args.tolerance:
        sys.exit(f"the two losses differ by more than {args.tolerance:g}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="tp_pp", help="any Trainer strategy: tp_pp, tp, pp, ddp, ...")
    parser.add_argument("--devices", type=int, default=num_gpus or (4 if (os.cpu_count() or 1) >= 2 else 2))
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--val-every", type=int, default=75, help="steps between validations")
    parser.add_argument("--data", nargs="+", default=[], help="files or folders (default: the standard library)")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tie-head", action="store_true", help="one matrix for the embedding and the head")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="runs/gpt", help="folder of logs and checkpoints")
    parser.add_argument("--verify", metavar="CHECKPOINT", help="only load and validate it with a plain Trainer")
    parser.add_argument("--expect", type=float, default=math.nan, help="the validation loss that --verify must find")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference from --expect")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_arguments()
    if args.verify:
        verify(args)
    else:
        train(args)


if __name__ == "__main__":
    main()
