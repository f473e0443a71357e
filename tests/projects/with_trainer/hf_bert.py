"""tests/projects/hf_bert.py with the Hugging Face Trainer."""

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


def accuracy(result):
    predictions, labels = result
    return {"accuracy": float((predictions.argmax(-1) == labels).mean())}


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=0.002,
        weight_decay=0.1,
        adam_beta2=0.95,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_steps=1,
    )
    trainer = Trainer(
        task.model,
        arguments,
        data_collator=task.collate,
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
