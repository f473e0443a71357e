"""tests/projects/moco.py with the Hugging Face Trainer; several ranks would have to gather the keys of all ranks."""

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Contrast(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            keys = F.normalize(model.keys(inputs["others"]), dim=1)
        queries = F.normalize(model.encoder(inputs["views"]), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ model.queue.clone().T], dim=1)
        if model.training:
            model.enqueue(keys)
        loss = F.cross_entropy(logits / 0.2, torch.zeros(len(queries), dtype=torch.long, device=queries.device))
        return (loss, {"logits": logits}) if return_outputs else loss


class MoveKeys(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **others):
        model.move_keys()


def collate(samples):
    views, others = zip(*samples, strict=True)
    return {"views": torch.stack(views), "others": torch.stack(others)}


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=6,
        per_device_train_batch_size=8,
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["others"],
    )
    optimizer = torch.optim.SGD(task.model.encoder.parameters(), lr=0.1, momentum=0.9)
    trainer = Contrast(
        task.model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        callbacks=[MoveKeys()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
