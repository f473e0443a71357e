"""tests/projects/dcgan.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitDCGAN(lightning.LightningModule):
    def __init__(self, model, latent=6):
        super().__init__()
        self.model, self.latent, self.automatic_optimization = model, latent, False

    def training_step(self, real, batch_index):
        of_discriminator, of_generator = self.optimizers()
        noise = torch.randn(len(real), self.latent, 1, 1, device=self.device)

        self.toggle_optimizer(of_discriminator)
        fooled = F.softplus(self.model.discriminator(self.model.generator(noise).detach()))
        loss = (F.softplus(-self.model.discriminator(real)) + fooled).mean()
        self.log("train/discriminator/loss", loss)
        self.step(of_discriminator, loss)

        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.model.discriminator(self.model.generator(noise))).mean()
        self.log("train/generator/loss", loss)
        self.step(of_generator, loss)

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        parts = self.model.discriminator, self.model.generator
        return [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]


def fit(task, folder):
    last = ModelCheckpoint(folder, save_last=True)
    # two optimizer steps per batch
    trainer = lightning.Trainer(max_steps=10, callbacks=[last], default_root_dir=folder)
    trainer.fit(LitDCGAN(task.model), DataLoader(task.dataset("train"), 8, shuffle=True), ckpt_path="last")
    return trainer
