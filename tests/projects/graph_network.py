"""A graph neural network on graphs of different sizes, which a batch joins into one large graph."""

import torch
from torch import nn

from runner import Task

SETTINGS = {"updates": 5, "global_batch_size": 8, "optimizer": "adam", "optimizer.lr": 0.01, "scheduler": "constant"}


def build(*, width: int = 8, layers: int = 2) -> Task:
    return Graphs(GraphNetwork(width, layers))


class GraphNetwork(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.first = nn.Linear(3, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.last = nn.Linear(width, 1)

    def forward(self, nodes, edges, graph, number):
        x = self.first(nodes)
        for layer in self.layers:
            received = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = x + layer(torch.cat([x, received], 1)).relu()
        return self.last(x.new_zeros(number, x.shape[1]).index_add(0, graph, x)).squeeze(1)


def graphs(number, seed):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(number):
        size = int(torch.randint(2, 9, (), generator=generator))
        edges = torch.randint(0, size, (2, 2 * size), generator=generator)
        nodes = torch.randn(size, 3, generator=generator)
        result.append({"nodes": nodes, "edges": edges, "target": nodes[edges[0]].sum() / size})
    return result


class Graphs(Task):
    item = "graph"

    def __init__(self, model):
        self.model = model

    def dataset(self, split):
        return graphs(24, 0) if split == "train" else graphs(8, 1)

    def collate(self, samples):
        sizes = torch.tensor([len(sample["nodes"]) for sample in samples])
        starts = (sizes.cumsum(0) - sizes).tolist()
        return {
            "nodes": torch.cat([sample["nodes"] for sample in samples]),
            "edges": torch.cat([sample["edges"] + start for sample, start in zip(samples, starts, strict=True)], 1),
            "graph": torch.arange(len(samples)).repeat_interleave(sizes),
            "target": torch.stack([sample["target"] for sample in samples]),
        }

    def loss(self, model, batch):
        predicted = model(batch["nodes"], batch["edges"], batch["graph"], len(batch["target"]))
        return (predicted - batch["target"]).square().sum(), len(batch["target"])
