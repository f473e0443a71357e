"""Tokenizer of word pieces with character offsets."""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

PAD, BEGIN, END, MASK = range(4)
NUM_SPECIAL = 4


class Tokenizer:
    """Splits words, digits and punctuation greedily into the longest known pieces; all single bytes are known.

    pieces  pieces other than single bytes; token 260 + i is pieces[i]
    """

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.bytes = [b""] * NUM_SPECIAL + [bytes([byte]) for byte in range(256)]
        self.bytes += [piece.encode() for piece in self.pieces]
        self.num_tokens = len(self.bytes)
        self._token = {piece: token for token, piece in enumerate(self.bytes) if token >= NUM_SPECIAL}
        self._longest = max(len(piece) for piece in self.bytes)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, without BEGIN and END."""
        return [token for word in WORD.findall(text) for token in self._cut(word)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens and their character ranges [start, end), without the space before a word.

        Each byte of a character has the range of the character.
        """
        tokens: list[int] = []
        offsets = []
        for match in WORD.finditer(text):
            word = match.group()
            # byte of the word -> index of its character in the text
            owner = [match.start() + i for i, character in enumerate(word) for _ in character.encode()]
            position = 0
            for token in self._cut(word):
                end = position + len(self.bytes[token])
                start = position + (self.bytes[token][:1] == b" " and end > position + 1)
                tokens.append(token)
                offsets.append((owner[start], owner[end - 1] + 1))
                position = end
        return tokens, offsets

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of the tokens before the first END."""
        parts = []
        for token in tokens:
            if token == END:
                break
            parts.append(self.bytes[token])
        return b"".join(parts).decode(errors="replace")

    def _cut(self, word: str) -> list[int]:
        known = self._known.get(word)
        if known is None:
            text, known, start = word.encode(), [], 0
            while start < len(text):
                end = next(
                    end
                    for end in range(min(len(text), start + self._longest), start, -1)
                    if text[start:end] in self._token
                )
                known.append(self._token[text[start:end]])
                start = end
            self._known[word] = known
        return known


def learn_pieces(texts: Iterable[str], num_tokens: int) -> list[str]:
    """Learn the pieces of a tokenizer of at most `num_tokens` tokens by byte-pair encoding.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, ACL 2016, section 3.2.
    """
    counts = Counter(word for text in texts for word in WORD.findall(text) if word.isascii())
    words = [(list(word), count) for word, count in sorted(counts.items()) if len(word) > 1 and count > 1]
    pairs: Counter[tuple[str, str]] = Counter()
    where: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for index, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            pairs[pair] += count
            where[pair].add(index)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    pieces: dict[str, None] = {}
    while heap and len(pieces) < num_tokens - NUM_SPECIAL - 256:
        count, pair = heapq.heappop(heap)
        if -count != pairs[pair] or count == 0:
            continue  # a stale count; the current one is also in the heap
        pieces["".join(pair)] = None
        changed: set[tuple[str, str]] = set()
        for index in where.pop(pair):
            parts, times = words[index]
            merged = _merge(parts, pair)
            for old in pairwise(parts):
                pairs[old] -= times
            for new in pairwise(merged):
                pairs[new] += times
                where[new].add(index)
            changed.update(pairwise(parts), pairwise(merged))
            words[index] = merged, times
        for pair in changed:
            heapq.heappush(heap, (-pairs[pair], pair))
    return list(pieces)


def _merge(parts: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    i = 0
    while i < len(parts):
        if tuple(parts[i : i + 2]) == pair:
            merged.append(parts[i] + parts[i + 1])
            i += 2
        else:
            merged.append(parts[i])
            i += 1
    return merged


# A line break with its indentation; letters, a digit or punctuation, each with the preceding space; other whitespace.
WORD = re.compile(r"\n *| ?[^\W\d_]+| ?\d| ?[^\w\s]| ?_|\s")
