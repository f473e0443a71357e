"""Create the files that a project reads: pretrained models of transformers, and tar files of images."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import torch

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def hf_gpt2(folder: Path) -> None:
    _save("gpt2", "AutoModelForCausalLM", folder)


def hf_bert(folder: Path) -> None:
    _save("bert", "AutoModelForMaskedLM", folder)


def webdataset_images(folder: Path) -> None:
    generator = np.random.default_rng(0)
    for number in range(4):
        with tarfile.open(folder / "data" / f"{number}.tar", "w") as archive:
            for place in range(10 + 4 * number):
                label = int(generator.integers(3))
                image = (generator.random((3, 8, 8)) * 160 + 40 * label).astype(np.uint8)
                stream = io.BytesIO()
                np.save(stream, image)
                for suffix, content in (("npy", stream.getvalue()), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number}-{place:03}.{suffix}")
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


def _save(kind: str, head: str, folder: Path) -> None:
    import transformers

    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    getattr(transformers, head).from_config(config).save_pretrained(folder / kind)
