"""tests/projects/streaming_text.py with the Hugging Face Trainer."""

import torch
from torch.nn import functional as F
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Texts(IterableDataset):
    """The texts of one worker. The Trainer reads all of them on each rank, and skips the samples of other ranks."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        worker = get_worker_info()
        return iter(self.stream("train", worker.id, worker.num_workers) if worker else self.stream("train", 0, 1))


class LanguageModeling(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = inputs["tokens"]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


def collate(samples):
    return {"tokens": torch.stack(samples)}


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
        label_names=["tokens"],
    )
    decayed = [weight for weight in task.model.parameters() if weight.dim() > 1]
    others = [weight for weight in task.model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    trainer = LanguageModeling(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=Texts(task.stream),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, 6 - update))),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
