"""tests/projects/streaming_text.py with Lightning. A resumed run starts again with the first text."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Texts(IterableDataset):
    """The texts of one worker of a rank."""

    def __init__(self, stream, rank, num_ranks):
        self.stream, self.rank, self.num_ranks = stream, rank, num_ranks

    def __iter__(self):
        worker = get_worker_info()
        index, number = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(self.stream("train", self.rank * number + index, self.num_ranks * number))


class LitText(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, tokens):
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens, batch_index):
        loss = self.loss(tokens)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, tokens, batch_index):
        self.log("val/loss", self.loss(tokens))

    def configure_optimizers(self):
        decayed = [weight for weight in self.parameters() if weight.dim() > 1]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: min(1.0, self.trainer.max_steps - update)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(task, folder):
    best = ModelCheckpoint(folder, monitor="val/loss", save_last=True)
    trainer = lightning.Trainer(
        max_steps=6, gradient_clip_val=1.0, val_check_interval=3, callbacks=[best], default_root_dir=folder
    )
    train = DataLoader(Texts(task.stream, trainer.global_rank, trainer.world_size), 6)
    trainer.fit(LitText(task.model), train, DataLoader(task.dataset("val"), 6), ckpt_path="last")
    return trainer
