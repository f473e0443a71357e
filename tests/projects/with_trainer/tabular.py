"""tests/projects/tabular.py with the Hugging Face Trainer."""

import torch
from torch.nn import functional as F
from torchmetrics.functional import auroc, confusion_matrix
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Classification(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["categories"], inputs["numbers"])
        weight = torch.tensor(3.0, device=logits.device)
        loss = F.binary_cross_entropy_with_logits(logits, inputs["label"].to(logits.dtype), pos_weight=weight)
        return (loss, {"logits": logits}) if return_outputs else loss


def metrics(result):
    logits, labels = map(torch.from_numpy, result)
    counts = confusion_matrix(logits.sigmoid(), labels, task="binary")
    named = {f"confusion.{row}.{column}": int(counts[row, column]) for row in range(2) for column in range(2)}
    return {"auroc": float(auroc(logits.sigmoid(), labels, task="binary")), **named}


def factor(update, updates=5):
    return (1 - max(0, update - 1) / (updates - 1)) ** 2


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=8,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="auroc",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["label"],
    )
    decayed = [weight for weight in task.model.parameters() if weight.dim() > 1]
    others = [weight for weight in task.model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95))
    trainer = Classification(
        task.model,
        arguments,
        data_collator=task.collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
        compute_metrics=metrics,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
