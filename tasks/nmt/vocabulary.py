"""Lossless tokenization: frequent pieces of words and punctuation, and bytes for the rest.

A token is a word (a run of letters) or text (anything else). The single space between two consecutive words is
implicit. So `key` is the same token in a description and in a signature, with one shared embedding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from runner.base.errors import ConfigError, Problem

PAD, BEGIN, END = 0, 1, 2
FIRST_ORDINARY = 3


class Vocabulary(Protocol):
    """Tokens 0 to num_tokens - 1: padding, begin, end, and the tokens of texts."""

    num_tokens: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class SubwordVocabulary:
    """Padding, begin, end, a joint for two words without a space between them, 256 bytes, then the pieces.

    pieces  strings into which PIECE splits a text, the most frequent first
    Every text can be encoded, so there is no unknown token.
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.num_tokens = LEAST_SIZE + len(self.pieces)
        self._numbers = {piece: LEAST_SIZE + number for number, piece in enumerate(self.pieces)}
        self._is_word = [False] * LEAST_SIZE + [_is_word(piece) for piece in self.pieces]
        self._known: dict[str, list[int]] = {}

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> SubwordVocabulary:
        """Return a vocabulary of at most `size` tokens: the most frequent pieces of `texts` that occur at least twice.

        Raises ConfigError if `size` is too small for any piece.
        """
        if size <= LEAST_SIZE:
            what = f"must be more than {LEAST_SIZE} (bytes and special tokens), but is {size}"
            raise ConfigError(Problem(what, "task.vocab_size", "leave it out for the usual size"))
        counts = Counter(piece for text in texts for piece in PIECE.findall(text))
        frequent = [
            piece for piece, count in counts.items() if count > 1 and (_is_word(piece) or len(piece.encode()) > 1)
        ]
        return cls(sorted(frequent, key=lambda piece: (-counts[piece], piece))[: size - LEAST_SIZE])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; decoding restores it."""
        parts = [token for piece in PIECE.findall(text) for token in self._tokenize_piece(piece)]
        tokens = []
        for before, token, after in zip([PAD, *parts], parts, [*parts[1:], PAD], strict=False):
            if token == SPACE and self._is_word[before] and self._is_word[after]:
                continue
            if self._is_word[before] and self._is_word[token]:
                tokens.append(JOINT)
            tokens.append(token)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text, after_word = b"", False
        for token in tokens:
            if token < FIRST_ORDINARY:
                continue
            is_word = self._is_word[token]
            text += b" " * (after_word and is_word)
            if token >= LEAST_SIZE:
                text += self.pieces[token - LEAST_SIZE].encode()
            elif token != JOINT:
                text += bytes([token - FIRST_BYTE])
            after_word = is_word
        return text.decode(errors="replace")

    def _tokenize_piece(self, piece: str) -> list[int]:
        """Return the tokens of a piece: repeatedly its longest known prefix, or the bytes of one character."""
        if piece not in self._known:
            tokens, rest = [], piece
            while rest:
                length = next((end for end in range(len(rest), 0, -1) if rest[:end] in self._numbers), 0)
                # A single letter inside a word is a byte; as a word it would need a joint on both sides.
                if length > 1 or (length == 1 and (rest == piece or not rest[0].isascii())):
                    tokens.append(self._numbers[rest[:length]])
                else:
                    length = 1
                    tokens += [FIRST_BYTE + byte for byte in rest[0].encode()]
                rest = rest[length:]
            self._known[piece] = tokens
        return self._known[piece]


class Numbers:
    """Tokens without meaning, written as numbers separated by spaces."""

    def __init__(self, num_tokens: int) -> None:
        if num_tokens <= FIRST_ORDINARY:
            what = f"must be more than {FIRST_ORDINARY} (special tokens), but is {num_tokens}"
            raise ConfigError(Problem(what, "task.vocab_size", "leave it out for the usual size"))
        self.num_tokens = num_tokens

    def encode(self, text: str) -> list[int]:
        tokens = [int(word) if word.isdecimal() else -1 for word in text.split()]
        if any(not FIRST_ORDINARY <= token < self.num_tokens for token in tokens):
            known = f"numbers from {FIRST_ORDINARY} to {self.num_tokens - 1} separated by spaces"
            what = f"with task.data=random a text must be {known}, but is {text!r}"
            raise ConfigError(Problem(what, "inference.source"))
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(str(token) for token in tokens if token >= FIRST_ORDINARY)


def _is_word(piece: str) -> bool:
    return piece.isascii() and piece.isalpha()


JOINT = 3
FIRST_BYTE = 4
SPACE = FIRST_BYTE + ord(" ")
LEAST_SIZE = FIRST_BYTE + 256
# Words, split at camelCase boundaries; runs of underscores; punctuation with its spaces; other single characters.
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|_+| ?[^\w\s] ?|.", re.DOTALL)
