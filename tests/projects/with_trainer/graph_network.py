"""tests/projects/graph_network.py with the Hugging Face Trainer."""

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Regression(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        number = len(inputs["target"])
        predicted = model(inputs["nodes"], inputs["edges"], inputs["graph"], number)
        loss = F.mse_loss(predicted, inputs["target"])
        return (loss, {"predicted": predicted}) if return_outputs else loss


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
        label_names=["target"],
    )
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.01)
    trainer = Regression(
        task.model,
        arguments,
        data_collator=task.collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
