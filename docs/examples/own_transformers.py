"""A Hugging Face model from its config, trained from scratch.

    accel-run train --task ./own_transformers.py task.layers=4

Nothing is downloaded. To use weights from the hub, call AutoModelForCausalLM.from_pretrained(...) instead of
from_config, or pass weights=model.safetensors on the command line with a file that you have downloaded.
"""

from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from runner import Task

SETTINGS = {"updates": 300, "global_batch_size": 16, "optimizer.lr": 0.001}


def build(context, *, kind: str = "gpt2", layers: int = 2, width: int = 64, block: int = 64) -> Task:
    config = AutoConfig.for_model(
        kind, vocab_size=256, num_hidden_layers=layers, hidden_size=width, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    return Text(AutoModelForCausalLM.from_config(config), block, context.data_path)


class Text(Task):
    item = "token"

    def __init__(self, model, block, path):
        self.model, self.block, self.items_per_sample = model, block, block
        text = Path(path or __file__).read_bytes()  # data.path=FILE: any text; default: this file
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def dataset(self, split):
        length = self.block + 1
        pieces = self.tokens[: len(self.tokens) // length * length].view(-1, length)
        return pieces[:-2] if split == "train" else pieces[-2:]

    def loss(self, model, tokens):
        logits = model(input_ids=tokens[:, :-1]).logits  # not labels=...: that loss is already a mean
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"), len(targets)
