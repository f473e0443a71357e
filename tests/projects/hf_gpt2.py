"""GPT-2 from transformers, loaded from a local folder and fine-tuned on texts of different lengths."""

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from runner import Task

SETTINGS = {
    "updates": 4,
    "global_batch_size": 8,
    "optimizer.lr": 0.002,
    "scheduler": "linear",
    "scheduler.warmup": 0,
    "max_grad_norm": 1.0,
}


def build(context, *, model: str = "gpt2") -> Task:
    return FineTuning(AutoModelForCausalLM.from_pretrained(model, dtype=torch.get_default_dtype()), context.seed)


class FineTuning(Task):
    item = "token"

    def __init__(self, model, seed):
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 13, (32,), generator=generator).tolist()
        self.texts = [torch.randint(1, 32, (length,), generator=generator) for length in lengths]

    def dataset(self, split):
        return self.texts[:24] if split == "train" else self.texts[24:]

    def collate(self, texts):
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)  # 0 marks padding

    def loss(self, model, tokens):
        logits = model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits[:, :-1]
        targets = tokens[:, 1:]
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return total, (targets != 0).sum()
