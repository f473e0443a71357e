"""tests/projects/lora_classifier.py with peft and the Hugging Face Trainer."""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Classification(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["tokens"])
        loss = F.cross_entropy(logits, inputs["labels"])
        return (loss, {"logits": logits}) if return_outputs else loss


def collate(samples):
    tokens, labels = zip(*samples, strict=True)
    return {"tokens": torch.stack(tokens), "labels": torch.stack(labels)}


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
    config = LoraConfig(r=2, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["head"])
    model = get_peft_model(task.model, config)
    optimizer = torch.optim.Adam((weight for weight in model.parameters() if weight.requires_grad), lr=0.01)
    trainer = Classification(
        model,
        arguments,
        data_collator=collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
