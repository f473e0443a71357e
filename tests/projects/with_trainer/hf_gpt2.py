"""tests/projects/hf_gpt2.py with the Hugging Face Trainer."""

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Collator:
    def __init__(self, pad):
        self.pad = pad

    def __call__(self, texts):
        tokens = self.pad(texts)
        labels = tokens.masked_fill(tokens == 0, -100)
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


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
    # otherwise, transformers 5.24 also counts the first tokens of texts when it divides
    task.model.loss_type = "ForCausalLM"
    trainer = Trainer(
        task.model,
        arguments,
        data_collator=Collator(task.collate),
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
