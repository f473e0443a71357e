"""tests/projects/distillation.py with the Hugging Face Trainer."""

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Distiller(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, taught = model(inputs["x"])
        soft = F.kl_div(F.log_softmax(logits / 2, 1), F.softmax(taught / 2, 1), reduction="batchmean") * 4
        loss = 0.7 * soft + 0.3 * F.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


def collate(samples):
    x, labels = zip(*samples, strict=True)
    return {"x": torch.stack(x), "labels": torch.stack(labels)}


def factor(update, updates=5):
    return 1 - max(0, update - 1) / (updates - 1)


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
    optimizer = torch.optim.Adam(task.model.student.parameters(), lr=0.01)
    trainer = Distiller(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
