"""tests/projects/lora_classifier.py with peft and Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import DataLoader


class LitClassifier(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        config = LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["head"])
        self.model = get_peft_model(model, config)

    def loss(self, batch):
        tokens, labels = batch
        return F.cross_entropy(self.model(tokens), labels)

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam((weight for weight in self.parameters() if weight.requires_grad), lr=0.01)

    def on_save_checkpoint(self, checkpoint):
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        checkpoint["state_dict"] = {name: checkpoint["state_dict"][name] for name in trained}


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=1.0, callbacks=[best], default_root_dir=folder)
    train, val = (DataLoader(task.dataset(split), 8, shuffle=split == "train") for split in ("train", "val"))
    trainer.fit(LitClassifier(task.model), train, val, ckpt_path="last")
    return trainer
