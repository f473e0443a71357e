"""tests/projects/actor_critic.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitActorCritic(lightning.LightningModule):
    def __init__(self, model, steps=6, discount=0.9):
        super().__init__()
        self.model, self.steps, self.discount, self.automatic_optimization = model, steps, discount, False
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))  # `global_step` counts both optimizers

    @torch.no_grad()
    def episode(self, state):
        """Return states (B, T, 2), actions and discounted returns (B, T) of episodes of the current policy."""
        chance = torch.rand(len(state), self.steps, device=self.device)
        states, actions, rewards = [], [], []
        for step in range(self.steps):
            right = F.softmax(self.model["actor"](state), 1)[:, 1]
            states.append(state)
            actions.append((chance[:, step] < right).long())
            speed = 0.8 * state[:, 1] + 0.2 * (2 * actions[-1] - 1)
            state = torch.stack([state[:, 0] + 0.5 * speed, speed], 1)
            rewards.append(-state[:, 0].abs())
        returns = [torch.zeros_like(rewards[0])]
        for reward in reversed(rewards):
            returns.insert(0, reward + self.discount * returns[0])
        return torch.stack(states, 1), torch.stack(actions, 1), torch.stack(returns[:-1], 1)

    def training_step(self, start, batch_index):
        of_critic, of_actor = self.optimizers()
        states, actions, returns = self.episode(start)
        loss = F.mse_loss(self.model["critic"](states).squeeze(2), returns)
        self.log("train/critic/loss", loss)
        self.step(of_critic, loss)
        if self.updates % 2 == 0:
            advantage = returns - self.model["critic"](states).squeeze(2).detach()
            policy = torch.distributions.Categorical(logits=self.model["actor"](states))
            loss = -(policy.log_prob(actions) * advantage).mean()
            self.log("train/actor/loss", loss)
            self.step(of_actor, loss)
        self.updates += 1

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()

    def validation_step(self, start, batch_index):
        self.log("val/return", self.episode(start)[2][:, 0].mean())

    def configure_optimizers(self):
        critic, actor = self.model["critic"].parameters(), self.model["actor"].parameters()
        return torch.optim.Adam(critic, lr=0.01), torch.optim.Adam(actor, lr=0.005)


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/return", mode="max", save_last=True)
    trainer = lightning.Trainer(
        max_steps=8, callbacks=[best], default_root_dir=folder
    )  # 5 steps of the critic, 3 of the actor
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitActorCritic(task.model), train, val, ckpt_path="last")
    return trainer
