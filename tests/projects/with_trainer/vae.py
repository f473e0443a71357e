"""tests/projects/vae.py with the Hugging Face Trainer, which reports only the loss, not its two terms."""

from types import SimpleNamespace

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Autoencoding(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x = inputs["x"]
        noise = SimpleNamespace(normal=lambda size: torch.randn(len(x), size, device=x.device))
        logits, mean, log_variance = model(x, noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = reconstruction + 0.5 * divergence
        return (loss, {"logits": logits}) if return_outputs else loss


def collate(samples):
    return {"x": torch.stack(samples)}


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["x"],
    )
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
    trainer = Autoencoding(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
