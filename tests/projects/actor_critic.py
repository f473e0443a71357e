"""Actor-critic in a tiny environment: reach the middle of a line. A sample is the initial state of an episode."""

import torch
from torch import nn
from torch.nn import functional as F

from runner import Task, per_sample_noise

SETTINGS = {"updates": 5, "global_batch_size": 8, "optimizer": "adam", "scheduler": "constant", "max_grad_norm": 0.5}
OBJECTIVES = {
    "critic": {"trains": ["critic"], "optimizer.lr": 0.01},
    "actor": {"trains": ["actor"], "optimizer.lr": 0.005, "every": 2},
}


def build(*, steps: int = 6, discount: float = 0.9) -> Task:
    return Line(steps, discount)


def mlp(outputs):
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs))


class Line(Task):
    item = "episode"

    def __init__(self, steps, discount):
        self.steps, self.discount = steps, discount
        self.model = nn.ModuleDict({"actor": mlp(2), "critic": mlp(1)})

    def dataset(self, split):  # initial states, which consist of position and velocity
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        return torch.rand(24 if split == "train" else 8, 2, generator=generator) * 2 - 1

    def episode(self, model, state):
        """Return states (B, T, 2), actions and discounted returns (B, T) of episodes of the current policy."""
        chance = per_sample_noise(state).uniform(self.steps)
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for step in range(self.steps):
                right = F.softmax(model["actor"](state), 1)[:, 1]
                states.append(state)
                actions.append((chance[:, step] < right).long())
                velocity = 0.8 * state[:, 1] + 0.2 * (2 * actions[-1] - 1)
                state = torch.stack([state[:, 0] + 0.5 * velocity, velocity], 1)
                rewards.append(-state[:, 0].abs())
            returns = [torch.zeros_like(rewards[0])]
            for reward in reversed(rewards):
                returns.insert(0, reward + self.discount * returns[0])
        return torch.stack(states, 1), torch.stack(actions, 1), torch.stack(returns[:-1], 1)

    def loss(self, model, start, objective):
        states, actions, returns = self.episode(model, start)
        values = model["critic"](states).squeeze(2)
        if objective == "critic":
            return (values - returns).square().mean(1).sum(), len(start)
        chosen = F.log_softmax(model["actor"](states), 2).gather(2, actions[..., None]).squeeze(2)
        return -(chosen * (returns - values).detach()).mean(1).sum(), len(start)

    def evaluate(self, model, start):
        return {"return": (self.episode(model, start)[2][:, 0].sum(), len(start))}
