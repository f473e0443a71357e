"""tests/projects/triplets.py with the Hugging Face Trainer; its loss compares only the samples of one micro-batch."""

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Triplets(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        codes, labels = model(inputs["inputs"]), inputs["labels"]
        distances = (codes[:, None] - codes[None]).square().sum(2).add(1e-12).sqrt()
        same = labels[:, None] == labels[None]
        farthest = distances.masked_fill(~same, 0).amax(1)
        nearest = distances.masked_fill(same, float("inf")).amin(1)
        loss = (farthest - nearest + 0.3).clamp(min=0)[nearest.isfinite()].mean()
        return (loss, {"codes": codes}) if return_outputs else loss


def collate(samples):
    inputs, labels = zip(*samples, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=12,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.005)
    trainer = Triplets(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
