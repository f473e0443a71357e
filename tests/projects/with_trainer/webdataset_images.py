"""tests/projects/webdataset_images.py with the Hugging Face Trainer."""

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
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=6,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=3,
        save_steps=3,
        metric_for_best_model="loss",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9)
    trainer = Classification(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
