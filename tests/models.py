"""Models of every kind that is cut into stages or refused, each with the step that a user would write.

All weights are set by formula. A step takes a micro-batch of `make_batch` and returns its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, LENGTH, CLASSES = 8, 2, 11, 6, 5

Batch = dict[str, Tensor]


def fill(module: nn.Module, dtype: torch.dtype = torch.float64) -> None:
    """Sets every parameter by formula: small and all different; those of norms near 1."""
    module.to(dtype)
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            wave = torch.sin(torch.arange(parameter.numel(), dtype=dtype) * 1.7 + place).view(parameter.shape)
            fan_in = max(1, parameter[0].numel() if parameter.dim() > 1 else 1)
            parameter.copy_(wave / fan_in**0.5 if parameter.dim() > 1 else 1 + 0.1 * wave)


def make_batch(number: int, samples: int = 2, length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Batch:
    """A micro-batch by formula: token ids, a padding mask, images and labels."""
    ids = (torch.arange(samples * length) * (number + 3) + number).view(samples, length) % VOCABULARY
    mask = torch.ones(samples, length, dtype=torch.int64)
    mask[0, length - 2 :] = 0
    image = torch.cos(torch.arange(samples * 3 * 64, dtype=dtype) * 0.37 + number).view(samples, 3, 8, 8)
    labels = (torch.arange(samples) * 3 + number) % CLASSES
    return {"ids": ids, "mask": mask, "image": image, "labels": labels}


class Task(nn.Module):
    """A model with its step. `pattern` names the modules that stages are made of."""

    pattern = "blocks.*"

    def step(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------ language models
class Block(nn.Module):
    """A pre-norm transformer layer; `bias` is added to the attention scores."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        samples, length, _ = x.shape
        q, k, v = (t.view(samples, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        x = x + self.proj(y.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.mlp(self.ln2(x))


class SequentialGPT(Task):
    """Blocks in a Sequential. Subclasses change what happens around the blocks."""

    container: type[nn.Module] = nn.Sequential
    block: Callable[[], nn.Module] = Block

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Parameter(torch.empty(2 * LENGTH, WIDTH))
        layers_made = [type(self).block() for _ in range(layers)]
        self.blocks: Any = (
            nn.Sequential(*layers_made) if self.container is nn.Sequential else nn.ModuleList(layers_made)
        )
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tok(ids) + self.pos[: ids.shape[1]]

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        """Through the blocks."""
        return self.blocks(x)

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.ln(self.run(self.embed(ids), ids)))

    def step(self, batch: Batch) -> Tensor:
        ids = batch["ids"]
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class ListGPT(SequentialGPT):
    """Blocks in a ModuleList, run by a loop."""

    container = nn.ModuleList

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TiedGPT(ListGPT):
    """The head's weight is the embedding's."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.head.weight = self.tok.weight


class SharedBlocksGPT(ListGPT):
    """Two pairs of tied parameters between blocks, declared in crossed order."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.blocks[-1].mlp[0].weight = self.blocks[0].mlp[0].weight
        self.blocks[1].proj.weight = self.blocks[-1].proj.weight


class BiasedGPT(ListGPT):
    """A learned bias, computed once before the blocks, enters each of them."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.relative = nn.Parameter(torch.empty(HEADS, 2 * LENGTH, 2 * LENGTH))

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        causal = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        bias = self.relative[:, :length, :length] * 2.0 + causal
        for block in self.blocks:
            x = block(x, bias=bias)
        return x


class ConditionedGPT(ListGPT):
    """A value of the embedding is used again after the blocks."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.condition = nn.Linear(WIDTH, WIDTH)

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        condition = self.condition(self.tok(ids).mean(1, keepdim=True))
        return super().run(x, ids) + condition


class BetweenGPT(ListGPT):
    """The loop computes with a parameter between the blocks."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.scales = nn.Parameter(torch.empty(layers, WIDTH))

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return x


class InPlaceGPT(ListGPT):
    """Writes into the embedding through views, and into what a block returned."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        x[:, 0] += self.pos[1]
        x.view(-1, WIDTH)[1:].mul_(0.9)
        for block in self.blocks:
            x = block(x)
            x[:, 1:] *= 1.1
        return x


class UnpackingGPT(ListGPT):
    """Drops padding by a mask of the batch before the blocks, and restores it after them."""

    def embed(self, ids: Tensor) -> Tensor:
        keep = ids != 0
        whole = super().embed(ids)
        flat = whole[keep]
        back = torch.zeros_like(whole)
        back[keep] = flat.masked_fill(ids[keep].unsqueeze(-1) == 1, 0.5)
        return back


class MaskedGPT(ListGPT):
    """A masked language model: which tokens are hidden is drawn in the step."""

    def step(self, batch: Batch) -> Tensor:
        hidden = torch.rand(batch["ids"].shape) < 0.4
        hidden[:, 0] = True
        logits = self.logits(batch["ids"].masked_fill(hidden, 0))
        return F.cross_entropy(logits[hidden], batch["ids"][hidden])


class InPlaceBlock(Block):
    """Writes into its input and returns it."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().forward(x.clone(), bias)
        return x.mul_(0.5).add_(y)


class InPlaceBlocksGPT(ListGPT):
    """Every block writes into its input and returns it."""

    block = InPlaceBlock


class Boundary(nn.Module):
    """A block whose value is a tuple of everything that may stand at a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        x, mask, positions, total, memo, nothing, name = state
        gate = torch.sigmoid(self.gate(x)) * mask.unsqueeze(-1)
        y = self.block(x) * gate + x * positions.unsqueeze(-1) / 8
        return y, mask & (positions < 5), positions + 1, total + y.float().mean(), memo * 2, nothing, name


class TupleGPT(SequentialGPT):
    """Blocks that take and return a tuple: float64, bool, int64, float32, a tensor without gradient, None, a string."""

    block = Boundary

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        memo = x.detach().mean(1)
        state = (x, ids != 1, positions, torch.zeros((), dtype=torch.float32), memo, None, "name")
        x, mask, positions, total, memo, nothing, name = self.blocks(state)
        assert nothing is None, "None travels as None"
        assert name == "name", "strings travel"
        assert not memo.requires_grad, "what needs no gradient arrives like that"
        return x * mask.unsqueeze(-1) + total + memo.unsqueeze(1) + positions.unsqueeze(-1) * 0.1


class DictBlock(nn.Module):
    """A block that takes keywords and returns a nested dict."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, hidden: Tensor, extra: dict[str, list[Any]]) -> dict[str, Any]:
        y = self.block(hidden)
        return {"hidden": y, "extra": {"list": [*extra["list"][:1], y.mean((1, 2))]}}


class DictGPT(ListGPT):
    """Blocks called by keyword that return nested dicts."""

    block = DictBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": x, "extra": {"list": [3, x.mean((1, 2))]}}
        for block in self.blocks:
            state = block(**state)
        assert state["extra"]["list"][0] == 3, "numbers travel"
        return state["hidden"] * state["extra"]["list"][1][:, None, None]


class IgnoredOutput(nn.Module):
    """Returns a second value with a gradient that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(x)
        return y, y * 2


class IgnoredOutputGPT(ListGPT):
    """A part of each block's value is used by no one."""

    block = IgnoredOutput

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


class LastSkipGPT(ListGPT):
    """The output of the second block is used again at the end, by code after the blocks."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        kept = x
        for index, block in enumerate(self.blocks):
            x = block(x)
            kept = x if index == 1 else kept
        return x + 0.5 * kept


class PrefixGPT(ListGPT):
    """Writes the embedding into a tensor of zeros, and looks at shapes on the way."""

    def embed(self, ids: Tensor) -> Tensor:
        x = torch.zeros(len(ids), ids.shape[1] + 1, WIDTH, dtype=self.pos.dtype)
        x[:, 1:] = super().embed(ids)
        x[:, 0].copy_(self.pos[0].expand(len(ids), -1))
        x += self.pos[0, 0]
        return torch.cat([x[:, :1] + x[:, 1:2], x[:, 2:]], 1).contiguous()


# ------------------------------------------------------------------------------------------------ refused
class SkipGPT(ListGPT):
    """U-Net: outputs of the first blocks enter the last ones."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        kept: list[Tensor] = []
        half = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= len(self.blocks) - half:
                x = x + kept.pop()
            x = block(x)
            if index < half:
                kept.append(x)
        return x


class RememberingBlock(Block):
    """Keeps its input where other blocks find it."""

    store: list[Tensor]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.store.append(x * 2)
        return super().forward(x, bias) + self.store[0]


class SideChannelGPT(ListGPT):
    """A value passes from block to block through a Python object."""

    block = RememberingBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        store: list[Tensor] = []
        for block in self.blocks:
            block.store = store
        return super().run(x, ids)


class AccumulatingBlock(Block):
    """Adds to a tensor that the caller handed in."""

    def forward(self, x: Tensor, bias: Tensor | None = None, total: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        assert total is not None, "the loop hands it in"
        total += y.mean()
        return y


class AccumulatingGPT(ListGPT):
    """Every block adds its part of an auxiliary loss to one tensor in place."""

    block = AccumulatingBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for block in self.blocks:
            x = block(x, total=total)
        return x + total


class InPlaceIgnoredGPT(ListGPT):
    """Runs blocks for what they write into their input, and ignores what they return."""

    block = InPlaceBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        x = F.one_hot(ids % WIDTH, WIDTH).to(x.dtype)
        for block in self.blocks:
            block(x)
        return x


class ReadingGPT(ListGPT):
    """Python looks at a value of the embedding."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        if x.abs().max().item() > 1e9:
            x = x * 0
        return super().run(x, ids)


class CodedGPT(ListGPT):
    """Adds a code of as many classes as given to the embedding; its shape is known without looking."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().run(x + F.one_hot(x.argmax(-1), num_classes=WIDTH), ids)


class TrackingGPT(ListGPT):
    """Keeps a running mean of the embedding in a buffer."""

    mean: Tensor

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().run(x - self.mean, ids)


class SelectingGPT(ListGPT):
    """The shape of what enters the blocks depends on values of the embedding."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen = x.mean((0, 2)) > -1e9
        return super().run(x[:, chosen], ids)


class CollectingGPT(ListGPT):
    """Averages the outputs of all blocks."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return torch.stack(outputs).mean(0)


class TwiceGPT(ListGPT):
    """Runs every block twice."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().run(super().run(x, ids), ids)


class PenalizedGPT(ListGPT):
    """Differentiates by what goes into the first block."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = super().run(x, ids)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square().mean()


class ForceGPT(ListGPT):
    """Differentiates by what the last block returns, which the last stage can do alone."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        y = super().run(x, ids)
        (gradient,) = torch.autograd.grad(y.sin().sum(), y, create_graph=True)
        return y + gradient


class ReversedGPT(ListGPT):
    """Runs the blocks from the last to the first."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class UncalledGPT(ListGPT):
    """Calls the parts of its blocks, never the blocks."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.mlp(block.ln2(x))
        return x


class DisconnectedGPT(ListGPT):
    """The last blocks read the embedding, not what the blocks before them returned."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        first = x
        for index, block in enumerate(self.blocks):
            x = block(first if index == 2 else x)
        return x


class NumberBlock(Block):
    """Returns a Python number."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
        super().forward(x, bias)
        return 1.0


class NumberGPT(ListGPT):
    """Blocks that return no tensor."""

    block = NumberBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * block(x)
        return x


@dataclass
class State:
    """What blocks hand on, in a class that nobody knows how to take apart."""

    hidden: Tensor
    depth: int = 0


class ObjectBlock(Block):
    """Takes and returns an object."""

    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden), state.depth + 1)


class ObjectGPT(ListGPT):
    """Blocks that pass an object on."""

    block = ObjectBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state)
        return state.hidden


class CommonGPT(ListGPT):
    """Almost all parameters are used by every block."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__(layers)
        self.common = nn.Parameter(torch.empty(WIDTH, 99 * WIDTH))

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.common.view(WIDTH, 99, WIDTH).mean((0, 1)))
        return x


# ------------------------------------------------------------------------------------------------ images
class ConvBlock(nn.Module):
    """A residual block; the shape changes with `stride`. BatchNorm keeps running statistics; ReLU writes in place."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.down = None if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.down is None else self.down(x)))


class ResNet(Task):
    """Stages of blocks with BatchNorm, before the blocks too."""

    pattern = "layer*.*"

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(ConvBlock(4, 4, 1), ConvBlock(4, 4, 1))
        self.layer2 = nn.Sequential(ConvBlock(4, 8, 2), ConvBlock(8, 8, 1))
        self.layer3 = nn.Sequential(ConvBlock(8, 8, 2))
        self.fc = nn.Linear(8, CLASSES)

    def step(self, batch: Batch) -> Tensor:
        x = self.relu(self.bn1(self.conv1(batch["image"])))
        x = self.layer3(self.layer2(self.layer1(x)))
        return F.cross_entropy(self.fc(x.mean((2, 3))), batch["labels"])


class Pyramid(ResNet):
    """A convolution between the blocks halves the image and changes the number of channels."""

    pattern = "blocks.*"

    def __init__(self) -> None:
        super().__init__()
        del self.layer1, self.layer2, self.layer3
        self.blocks = nn.ModuleList(ConvBlock(width, width, 1) for width in (4, 6, 8, 8))
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in ((4, 6), (6, 8)))

    def step(self, batch: Batch) -> Tensor:
        x = self.relu(self.bn1(self.conv1(batch["image"])))
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index < len(self.narrow):
                x = self.narrow[index](x)
                assert x.shape[1] == self.narrow[index].out_channels, "shapes are right on every stage"
        return F.cross_entropy(self.fc(x.mean((2, 3))), batch["labels"])


class Encoder(Task):
    """torch's own nn.TransformerEncoder over patches, with a class token."""

    pattern = "encoder.layers.*"

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.empty(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def step(self, batch: Batch) -> Tensor:
        x = self.patch(batch["image"]).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return F.cross_entropy(self.head(self.encoder(x)[:, 0]), batch["labels"])


# ------------------------------------------------------------------------------------------------ which is which
class TransformedBlock(nn.Module):
    """Differentiates inside of itself by `torch.func`: by its input, by weights, and forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def value(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def by_weights(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(self.up, weights, (x,)).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        y, pull = torch.func.vjp(self.value, x)
        _, pushed = torch.func.jvp(self.value, (x,), (y,))
        own = torch.func.grad(self.by_weights)(dict(self.up.named_parameters()), x)["weight"]
        each = torch.func.vmap(torch.func.grad(lambda v: self.value(v).square().sum()))(x)
        return x + 0.1 * torch.tanh(pull(y)[0] + pushed + each + F.linear(x, torch.tanh(own)))


class TransformedGPT(ListGPT):
    """Also differentiates what is not in blocks."""

    block = TransformedBlock

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        x = super().run(x + torch.func.grad(lambda v: torch.tanh(self.ln(v)).sum())(x), ids)
        return x + torch.func.grad(lambda v: torch.tanh(self.ln(v)).sum())(x)


class TransformedAcrossGPT(ListGPT):
    """Differentiates what blocks return by what goes into them."""

    def run(self, x: Tensor, ids: Tensor) -> Tensor:
        y, pull = torch.func.vjp(lambda v: ListGPT.run(self, v, ids), x)
        return y + pull(y)[0]


ACCEPTED: dict[str, Callable[[], Task]] = {
    "sequential": SequentialGPT,
    "list": ListGPT,
    "tied": TiedGPT,
    "force": ForceGPT,
    "transformed": TransformedGPT,
    "shared blocks": SharedBlocksGPT,
    "bias": BiasedGPT,
    "condition": ConditionedGPT,
    "between": BetweenGPT,
    "in place": InPlaceGPT,
    "in-place blocks": InPlaceBlocksGPT,
    "prefix": PrefixGPT,
    "unpacking": UnpackingGPT,
    "masked": MaskedGPT,
    "coded": CodedGPT,
    "tuple": TupleGPT,
    "dict": DictGPT,
    "ignored output": IgnoredOutputGPT,
    "resnet": ResNet,
    "pyramid": Pyramid,
    "encoder": Encoder,
}

REFUSED: dict[str, tuple[Callable[[], Task], str]] = {
    "skip": (SkipGPT, r"blocks\.4 uses a value of blocks\.0 through a skip connection"),
    "side channel": (SideChannelGPT, r"blocks\.3 uses a value of blocks\.0 through a side channel"),
    "accumulating": (AccumulatingGPT, "uses a value of blocks"),
    "in place, ignored": (InPlaceIgnoredGPT, "uses a value of blocks"),
    "reading": (ReadingGPT, "Python reads the value of a tensor that depends on pos"),
    "tracking": (TrackingGPT, "writes a value that depends on pos, .* into the buffer mean"),
    "selecting": (SelectingGPT, "Python reads the value of a tensor that depends on pos"),
    "collecting": (CollectingGPT, r"the code after the last block uses a value of blocks\.0"),
    "twice": (TwiceGPT, "the 5 blocks must each run once, in order, but the step ran: blocks.0, .*blocks.4, blocks.0"),
    "penalized": (
        PenalizedGPT,
        r"the step itself differentiates a value of blocks\.4 with respect to one from before the",
    ),
    "reversed": (ReversedGPT, r"must each run once, in order, but the step ran: blocks\.4, blocks\.3"),
    "uncalled": (UncalledGPT, "but the step ran: none of them"),
    "disconnected": (DisconnectedGPT, r"blocks\.2 does not receive the output of blocks\.1"),
    "object": (ObjectGPT, r"blocks\.0 returns State, which cannot be sent to another stage; return tensors, or tuples"),
    "number": (NumberGPT, r"blocks\.0 returns no tensor"),
    "common": (CommonGPT, "of the parameters would have to live on several stages"),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Task:
    """A model of either kind, filled by formula."""
    factory = ACCEPTED.get(name) or REFUSED[name][0]
    task = factory()
    fill(task, dtype)
    return task
