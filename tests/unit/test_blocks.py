"""Repeated blocks are found by structure, or by the user's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_parallel.blocks import find_blocks, resolve_blocks


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Language(nn.Module):
    def __init__(self, layers: int = 3, container: type[nn.Module] = nn.ModuleList) -> None:
        super().__init__()
        self.tok = nn.Embedding(1000, 8)
        blocks = [Block() for _ in range(layers)]
        self.blocks = container(blocks) if container is nn.ModuleList else container(*blocks)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))


class Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1)) if inputs != outputs else None


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Basic(4, 4), Basic(4, 4))
        self.layer2 = nn.Sequential(Basic(4, 8), Basic(8, 8))
        self.layer3 = nn.Sequential(Basic(8, 16))
        self.fc = nn.Linear(16, 5)


class Experts(nn.Module):
    """Each block holds a longer list, of fewer parameters in all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(2))

    @staticmethod
    def block() -> nn.Module:
        block = Block()
        block.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        return block


class Holder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_list_of_blocks(container: type[nn.Module]) -> None:
    assert find_blocks(Holder(Language(3, container))) == ("model.blocks.0", "model.blocks.1", "model.blocks.2")


def test_meta_device() -> None:
    with torch.device("meta"):
        assert find_blocks(Language(2)) == ("blocks.0", "blocks.1")


def test_numbered_containers_are_one_list() -> None:
    assert find_blocks(Residual()) == ("layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0")


def test_outer_list_is_taken_before_lists_inside() -> None:
    assert find_blocks(Experts()) == ("layers.0", "layers.1")


def test_blocks_between_other_layers_of_a_sequential() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), Block(), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 100))
    assert find_blocks(model) == ("1", "2", "3")


def test_single_block_in_a_list() -> None:
    model = Language(1)
    del model.heads
    assert find_blocks(model) == ("blocks.0",)


def test_nothing_repeated_names_candidates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Conv1d(4, 4, 1))
    model.add_module("tail", nn.Sequential(nn.Linear(4, 300), nn.ReLU(), nn.Bilinear(4, 4, 4)))
    with pytest.raises(ValueError, match=r"no ModuleList or Sequential of alike blocks.*blocks='tail\.\*'"):
        find_blocks(model)


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem0, self.stem1 = nn.Embedding(9000, 8), nn.Embedding(9000, 8)
        self.layer0, self.layer1 = Basic(4, 4), Basic(4, 4)


def test_alike_attributes_are_named_by_a_pattern_that_works() -> None:
    with pytest.raises(ValueError, match=r"for example TensorPipelineStrategy\(blocks='layer\*'\)"):
        find_blocks(Attributes())
    assert resolve_blocks(Attributes(), "layer*") == ("layer0", "layer1")


def test_a_dict_is_a_list_of_blocks_only_if_it_holds_nothing_else() -> None:
    model = Holder(nn.ModuleDict({"0": Block(), "1": Block(), "2": Block()}))
    assert find_blocks(model) == ("model.0", "model.1", "model.2")
    parts = {"wte": nn.Embedding(9000, 8), "wpe": nn.Embedding(9000, 8), "h": nn.ModuleList([Block(), Block()])}
    assert find_blocks(nn.ModuleDict(parts)) == ("h.0", "h.1")


def test_pattern_with_and_without_prefix() -> None:
    model = Holder(Language(3))
    expected = ("model.blocks.0", "model.blocks.1", "model.blocks.2")
    assert resolve_blocks(model, "auto") == expected
    assert resolve_blocks(model, "model.blocks.*") == expected
    assert resolve_blocks(model, "blocks.*") == expected
    assert resolve_blocks(model, ["blocks.1", "model.blocks.2"]) == expected[1:]


def test_patterns_keep_the_order_given() -> None:
    assert resolve_blocks(Residual(), ["layer2.*", "layer1.*"]) == ("layer2.0", "layer2.1", "layer1.0", "layer1.1")


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ("layers.*", r"'layers.\*' matches no module; close names: .*blocks\.\*"),
        (["blocks.0", "blocks.*"], "'blocks.0' is named 2 times"),
        (["blocks.*", "blocks.0.mlp"], "'blocks.0.mlp' lies inside block 'blocks.0'"),
        ([], r'blocks is empty; give "auto" or names such as \[.blocks'),
    ],
)
def test_wrong_names_are_refused(blocks: str | list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve_blocks(Language(2), blocks)
