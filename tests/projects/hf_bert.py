"""A BERT classifier from transformers, loaded from a local folder and fine-tuned with a new head, as with Trainer."""

import torch
from transformers import AutoModelForSequenceClassification

from runner import Task
from runner.adapters.transformers import TransformersTask

SETTINGS = {
    "updates": 4,
    "global_batch_size": 8,
    "optimizer.lr": 0.002,
    "scheduler": "linear",
    "scheduler.warmup": 0,
    "max_grad_norm": 1.0,
}


def accuracy(result):
    predictions, labels = result
    return {"accuracy": float((predictions.argmax(-1) == labels).mean())}


def padded(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    input_ids = torch.tensor(tokens)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != 0).long(), "labels": labels}


def texts(number, seed):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(number):
        length = int(torch.randint(4, 13, (), generator=generator))
        tokens = torch.randint(1, 32, (length,), generator=generator)
        result.append({"input_ids": tokens.tolist(), "labels": int(tokens.sum()) % 3})
    return result


def build(context, *, model: str = "bert") -> Task:
    network = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=3, dtype=torch.get_default_dtype(), ignore_mismatched_sizes=True
    )
    data = {"train": texts(24, 0), "validation": texts(8, 1)}
    return TransformersTask(network, data, collator=padded, compute_metrics=accuracy)
