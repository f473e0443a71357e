"""Tokenizers: bytes, a byte-pair encoding trained on the text, or token IDs if there is no text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runner.base.errors import ConfigError, Problem
from runner.base.packages import require

SEPARATOR = b"\0"  # ends every document, because text contains no NUL; every tokenizer counts it as one byte
END_OF_TEXT = "<|endoftext|>"  # the byte-pair token for SEPARATOR
GPT2_END = 50256  # the token for END_OF_TEXT in the encoding of GPT-2, which nanoGPT's prepare.py uses by default
ByteCounts = np.ndarray[Any, np.dtype[np.int64]]


class Tokenizer(Protocol):
    """Converts between text and tokens from 0 to num_tokens - 1.

    end        token that separates documents; None if it is unknown
    num_bytes  number of text bytes in each token (num_tokens,); None if the text is unknown
    """

    num_tokens: int
    num_bytes: ByteCounts | None

    @property
    def end(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """Every byte of UTF-8 is a token."""

    num_tokens = 256
    end = SEPARATOR[0]
    num_bytes: ByteCounts | None = np.ones(256, dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BytePairs:
    """Frequent sequences of bytes are tokens; any text can be encoded.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, ACL 2016; applied to the bytes
    of each word, as in GPT-2.
    """

    def __init__(self, path: Path) -> None:
        self._encoding = require("tokenizers", "bpe").Tokenizer.from_file(str(path))
        # If a text contains END_OF_TEXT, it is encoded as ordinary text.
        self._encoding.encode_special_tokens = True
        self.num_tokens = int(self._encoding.get_vocab_size())
        self.end = int(self._encoding.token_to_id(END_OF_TEXT))
        # The byte-level alphabet writes each byte as one character.
        lengths = [len(self._encoding.id_to_token(token)) for token in range(self.num_tokens)]
        lengths[self.end] = len(SEPARATOR)
        self.num_bytes: ByteCounts | None = np.array(lengths, dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return list(self._encoding.encode(text).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts on all cores."""
        return [encoding.ids for encoding in self._encoding.encode_batch_fast(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._encoding.decode(list(tokens), skip_special_tokens=False))


class Numbers:
    """Tokens of an unknown encoding, written as numbers separated by spaces."""

    num_bytes: ByteCounts | None = None

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.end = GPT2_END if num_tokens > GPT2_END else None

    def encode(self, text: str) -> list[int]:
        tokens = [int(word) if word.isdecimal() else -1 for word in text.split()]
        if any(not 0 <= token < self.num_tokens for token in tokens):
            what = f"must be token IDs from 0 to {self.num_tokens - 1} separated by spaces, but is {text!r}"
            raise ConfigError(Problem(what, "inference.prompt", "the encoding of token shards is unknown"))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def train_byte_pairs(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Write a byte-pair encoding of at most `vocab_size` tokens, learned from `texts`, to `path` as JSON.

    Raises MissingPackage if the package `tokenizers` is not installed.
    """
    library = require("tokenizers", "bpe")
    encoding = library.Tokenizer(library.models.BPE())
    encoding.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoding.train_from_iterator(texts, trainer)
    encoding.save(str(path))
