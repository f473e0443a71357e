"""Print how much held-out text of task gpt is also in its training text, before and after known blocks are removed.

A block is five consecutive non-blank lines, without their indentation. Without TEXT, the text is the standard library
of Python, and the figure depends only on the version of Python.
Run: python scripts/measure/leakage.py [TEXT]
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path

from runner.tasks.gpt.data import SPLITS, open_corpus


def main() -> None:
    text = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(text, Path(folder), tokenizer="byte", vocab_size=None)
        leakage = json.loads((corpus.cache / "leakage.json").read_text())
        print(f"{text or 'standard library of Python ' + platform.python_version()}")
        for split in SPLITS[1:]:
            before, after = leakage["of_documents"][split], leakage["of_text"][split]
            size = corpus.files[split].stat().st_size
            print(f"{split:5} {before:8.3%} of the blocks are in training, {after:.3%} after removal; {size:,} bytes")


if __name__ == "__main__":
    main()
