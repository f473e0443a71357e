"""Repeated blocks are found at any depth, and each is found once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runner.axes.memory import checkpoint
from runner.base.task import Task, repeated_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.parts = nn.ModuleList([nn.Linear(3, 3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.parts[0](self.inner(x)))


class Stack(nn.Module):
    """A model in which, as in Hugging Face models, the list of layers is several levels below the trained model."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 3)
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers.children():
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.transformer = Stack(layers)
        self.head = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.transformer(x))
        return out


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_nested_blocks_are_found_without_their_inner_blocks(container: type) -> None:
    blocks = [Block(), Block()]
    assert repeated_blocks(Model(container(blocks))) == blocks


def test_blocks_in_nested_lists_and_shared_blocks_are_found_once() -> None:
    one, other = Block(), Block()
    model = Stack(nn.ModuleList([nn.ModuleList([one, other]), nn.ModuleList([one])]))
    assert repeated_blocks(model) == [one, other]


def test_a_sequence_of_plain_layers_has_no_blocks() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) == []
    lone = Block()  # the outer list has no repeated modules, but its inner list has
    assert repeated_blocks(nn.Sequential(lone, nn.Tanh())) == list(lone.parts)


def test_checkpointing_recomputes_nested_blocks() -> None:
    blocks = [Block(), Block()]
    task = Task()
    task.model = Model(nn.ModuleList(blocks))
    report = checkpoint(task.model, task.blocks(), torch.device("cpu"))
    assert "2 of 2" in report[0]
    task.model(torch.ones(2, 3)).sum().backward()
    assert [block.calls for block in blocks] == [2, 2]
