"""tests/projects/speech_ctc.py with Lightning."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler


class Buckets(Sampler):
    """Batches of utterances of similar length: the samples of `bucket` batches are drawn together and sorted."""

    def __init__(self, lengths, size, bucket=4):
        self.lengths, self.size, self.bucket = torch.tensor(lengths), size, bucket

    def __len__(self):
        return len(self.lengths) // self.size

    def __iter__(self):
        buckets = torch.randperm(len(self.lengths)).split(self.size * self.bucket)
        batches = [batch for bucket in buckets for batch in bucket[self.lengths[bucket].argsort()].split(self.size)]
        return iter([batches[place].tolist() for place in torch.randperm(len(batches))])


class LitSpeech(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, batch):
        frames, lengths, texts, sizes = batch
        scores = self.model(frames, lengths).transpose(0, 1)
        total = F.ctc_loss(scores, texts, lengths, sizes, reduction="sum", zero_infinity=True)
        return total / len(lengths)  # reduction="mean" also divides by the lengths of the texts

    def training_step(self, batch, batch_index):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_index):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.005, self.trainer.max_steps, pct_start=0.4, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(max_steps=5, gradient_clip_val=5.0, callbacks=[best], default_root_dir=folder)
    data = task.dataset("train")
    train = DataLoader(data, batch_sampler=Buckets(data.lengths, 6), collate_fn=task.collate)
    val = DataLoader(task.dataset("val"), 6, collate_fn=task.collate)
    trainer.fit(LitSpeech(task.model), train, val, ckpt_path="last")
    return trainer
