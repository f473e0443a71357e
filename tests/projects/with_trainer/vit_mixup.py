"""tests/projects/vit_mixup.py with the Hugging Face Trainer."""

import math

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Classification(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["images"])
        loss = F.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


def collate(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def factor(update, warmup=1, updates=5, low=0.1):
    done = max(0, update - warmup) / (updates - warmup)
    return low + (1 - low) * (1 + math.cos(math.pi * done)) / 2


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
        label_names=["labels"],
    )
    decayed = [weight for weight in task.model.parameters() if weight.dim() > 1]
    others = [weight for weight in task.model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95))
    trainer = Classification(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
