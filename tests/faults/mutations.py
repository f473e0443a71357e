"""Invalid configurations: typos, impossible values, fragments of grammars, malformed YAML."""

# ruff: noqa: E501, RUF001 - tables of invalid input

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

# Unusual or impossible values; most keys refuse most of them.
SCALARS = (
    "", "0", "-1", "-0.0", "0.5", "1.5", "1e400", "-1e400", "1e-400", "nan", "NaN", "inf", "-inf", ".inf", "1e999999999",
    "99999999999999999999999999999999", "1_000", "0x10", "0b1", "0o7", "1e5", "1.0", "+5", "5.", ".5", "1e", "--1", "1/2",
    "yes", "no", "on", "off", "none", "None", "null", "NULL", "~", "true", "True", "FALSE", "auto", "abc", "two words",
    "١٢", "１２", "五", "½", "1,5", "1.000,5", "5s", "5min", "0min", "1e3min", "-3updates", "2 epochs", "updates", "10mins",
)  # fmt: skip
SHAPES = (
    "[]", "[1]", "[1,2]", "[[1,2],[3]]", "[[]]", "[null]", "[true]", "[a,b]", "['a','b']", "[0.1,0.9]", "[-1,2]", "[1e400]",
    "{}", "{a:1}", "{a:{b:1}}", "{a:[1,{b:2}]}", "{1:2}", "{lr:0.1}", "{lr:{x:1}}", "{'':1}", "{null:1}", "{a b:1}",
)  # fmt: skip
GRAMMAR = (
    "choice(1,2)", "choice()", "choice", "range(1,3)", "range(1)", "range(3,1,-0)", "range(0,1,1e-9)", "range(a,b)",
    "glob(*)", "glob([a,b],exclude=c)", "interval(0,1)", "sort(3,2,1)", "shuffle(1,2,3)", "tag(a,1)", "int(3.5)", "int(a)",
    "str([1,2])", "bool(maybe)", "float(x)", "json_str('{\"a\":1}')", "json_str(')", "extend_list(1,2)", "f(g(h(1)))", "f(",
    "cast(1)", "1,2", ",", "1,", ",1", "a,,b", "(1,2)", ")", "(", "[1,2", "1]", "{a:1", "a}", "[1,2}", "{a:1,b}", "{:}",
    "'", '"', "'a", '"a', "a'", "'a\"", "''", '""', "'a''b'", "\\", "\\\\", "a\\", "\\'", "'\\'", "$", "${", "${}", "${a",
    "${a}", "${optimizer.lr}", "${optimizer.lr", "${${a}}", "${a:${b}}", "${oc.env:HOME}", "${oc.env:NOT_THERE,5}",
    "${oc.env:HOME,${oc.env:PATH}}", "${env:HOME}", "${now:%Y}", "${hydra:job.name}", "${oc.decode:'[1]'}", "${oc.select:x}",
    "${oc.create:{a:1}}", "${oc.deprecated:x}", "${.lr}", "${..lr}", "${...lr}", "\\${a}", "$a", "$(ls)", "`ls`", "%(a)s",
    "a=b", "=", "==", "a:b", ":", "a@b", "@", "~a", "+a", "++a", "a#b", "#", "!x", "!!python/object:os.system", "&a", "*a",
    "|", ">", "- a", "? a", "a: b", "---", "...", "%YAML 1.1", "<<", "null,null", "a b=c", "a\tb",
)  # fmt: skip
UNICODE = (
    "е", "аdamw", "ａｄａｍｗ", "adam\u200bw", "\u202eadam", "a\u0301", "é", "e\u0301", "😀", "👩\u200d🔬", "\ufeffadamw", "\u00a0",
    "\u2028", "\u2029", "\x85", "\x7f", "\x1b[31mred\x1b[0m", "\x07", "\x08", "\r", "\r\n", "\n", "a\nb", "\n=1", "\t", "\v",
    "\ud800", "a\udcffb", "\x00", "a\x00b", "ß", "İ", "ı", "ﬁ", "Å", "\u212b", "〇", "٠", "𝟏", "１", "²", "Ⅷ", "−1", "1\u20091",
)  # fmt: skip
PREFIXES = (
    "+",
    "++",
    "~",
    "@",
    ":",
    "-",
    "--",
    "=",
    "#",
    "+~",
    "+++",
    "~~",
    ".",
    "..",
    "/",
    "\\",
    "$",
    "*",
    " ",
    "'",
    '"',
)
SUFFIXES = (
    ".", "..", ".x", ".x.y", ".0", "[0]", "[", "]", "@", "@a", "@a:b", ":", "/", "/x", "?", "!", "*", "+", "~", " ", "'", "()",
)  # fmt: skip

NEIGHBORS = {
    "q": "wa", "w": "qes", "e": "wrd", "r": "etf", "t": "ryg", "y": "tuh", "u": "yij", "i": "uok", "o": "ipl", "p": "ol",
    "a": "qsz", "s": "adwx", "d": "sfec", "f": "dgrv", "g": "fhtb", "h": "gjyn", "j": "hkum", "k": "jli", "l": "kop",
    "z": "xas", "x": "zcsd", "c": "xvdf", "v": "cbfg", "b": "vngh", "n": "bmhj", "m": "njk", "_": "-", "1": "2", "2": "13",
    "3": "24", "6": "57", "8": "79", "0": "9", ".": ",",
}  # fmt: skip


def typo(rng: random.Random, word: str) -> str:
    """Return the word with one typo: a letter deleted, doubled, inserted, transposed, replaced or of the other case."""
    at = rng.randrange(len(word))
    kind = rng.randrange(7)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2:
        return word[:at] + rng.choice(string.ascii_lowercase) + word[at:]
    if kind == 3 and len(word) > 1:
        at = min(at, len(word) - 2)
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 4 and word[at] in NEIGHBORS:
        return word[:at] + rng.choice(NEIGHBORS[word[at]]) + word[at + 1 :]
    if kind == 5:
        return word[:at] + word[at].swapcase() + word[at + 1 :]
    return word[:at] + rng.choice(string.ascii_lowercase) + word[at + 1 :]


def value(rng: random.Random) -> str:
    """Return a value that hardly any key accepts."""
    kind = rng.randrange(12)
    if kind < 8:
        return rng.choice((SCALARS, SHAPES, GRAMMAR, UNICODE)[kind % 4])
    if kind == 8:
        depth = rng.choice([3, 30, 300, 3000])
        opening, inner, closing = rng.choice(
            [("[", "1", "]"), ("{a:", "1", "}"), ("choice(", "1", ")"), ("${a:", "1", "}")]
        )
        return opening * depth + inner + closing * rng.choice([depth, depth, depth - 1, 0])
    if kind == 9:
        return rng.choice(["a", "1", "[", "'", "a.", "\\", "é", "1,", " "]) * rng.choice([10, 1000, 10_000, 1_000_000])
    if kind == 10:
        return "".join(rng.choice(string.printable) for _ in range(rng.randint(1, 30)))
    return "".join(rng.choice((*GRAMMAR, *SHAPES, *SCALARS)) for _ in range(rng.randint(2, 4)))


def spoil_word(rng: random.Random, known: Mapping[str, str]) -> str:
    """Return an invalid override; `known` is key -> a valid value."""
    key = rng.choice([*known])
    kind = rng.randrange(8)
    if kind < 3:
        return f"{key}={value(rng)}"
    if kind == 3:
        return f"{rng.choice(PREFIXES)}{key}={known[key]}"
    if kind == 4:
        return f"{key}{rng.choice(SUFFIXES)}={known[key]}"
    if kind == 5:
        return f"{key}{rng.choice(['', '=', '==', ' =', '= ', ':', ': ', ' ', '=='])}{known[key]}"
    if kind == 6:
        return rng.choice([*GRAMMAR, *UNICODE, *SCALARS])
    return f"{value(rng)[:1000]}={known[key]}"


# ---------------------------------------------------------------- files

Spoil = Callable[[random.Random, str], bytes]


def _lines(change: Callable[[random.Random, list[str]], Any]) -> Spoil:
    def spoil(rng: random.Random, text: str) -> bytes:
        lines = text.splitlines() or [""]
        change(rng, lines)
        return "\n".join(lines).encode()

    return spoil


def _at(rng: random.Random, lines: list[str]) -> int:
    return rng.randrange(len(lines))


def _insert(*new: str) -> Spoil:
    return _lines(lambda rng, lines: lines.insert(rng.randrange(len(lines) + 1), rng.choice(new)))


def _in_line(change: Callable[[random.Random, str], str]) -> Spoil:
    def spoil(rng: random.Random, lines: list[str]) -> None:
        at = _at(rng, lines)
        lines[at] = change(rng, lines[at])

    return _lines(spoil)


def _flip_bits(rng: random.Random, text: str) -> bytes:
    content = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


FILES: Mapping[str, Spoil] = {
    "tab": _in_line(lambda rng, line: "\t" + line),
    "tabs for spaces": lambda rng, text: text.replace("  ", "\t").encode(),
    "key twice": _lines(lambda rng, lines: lines.insert(_at(rng, lines), lines[_at(rng, lines)])),
    "line lost": _lines(lambda rng, lines: lines.pop(_at(rng, lines))),
    "indented": _in_line(lambda rng, line: "  " * rng.randint(1, 3) + line),
    "not indented": _in_line(lambda rng, line: line.lstrip()),
    "typo": _in_line(lambda rng, line: typo(rng, line) if line else "x"),
    "value": _in_line(lambda rng, line: f"{line.partition(':')[0]}: {value(rng)[:2000]}"),
    "anchor": _insert("x: &a [1]", "x: *a", "<<: *a", "y: &y {z: *y}", "&a x: *a", "x: &a\n  <<: *a"),
    "alias bomb": lambda rng, text: ("a: &a [1,1]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)) + text).encode(),
    "tag": _insert("x: !!python/object/apply:os.system [true]", "x: !!binary '@'", "x: !mine 1", "x: !!set {a}", "x: !!float a"),
    "windows": lambda rng, text: text.replace("\n", "\r\n").encode(),
    "old mac": lambda rng, text: text.replace("\n", "\r").encode(),
    "BOM": lambda rng, text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda rng, text: text.encode("utf-16"),
    "Latin-1": lambda rng, text: (text + "# \u00fcber\nx: \u00e9\n").encode("latin-1", errors="replace"),
    "not UTF-8": lambda rng, text: text.encode() + bytes([rng.randrange(128, 256)]) + b"\n",
    "empty": lambda rng, text: b"",
    "blank": lambda rng, text: rng.choice([b"\n\n", b" ", b"\t", b"---\n", b"...\n", b"# nothing\n", b"{}", b"null", b"---\n---\n"]),
    "scalar": lambda rng, text: rng.choice([b"5", b"text", b"'", b'"', b"true", b"2026-11-21", b"${a}"]),
    "list": lambda rng, text: rng.choice([b"- a\n- b\n", b"[]", b"[1, {a: 2}]", b"- lr: 1\n"]),
    "documents": lambda rng, text: (text + "---\n" + text).encode(),
    "cut": lambda rng, text: text.encode()[: rng.randrange(max(1, len(text.encode())))],
    "bits": lambda rng, text: _flip_bits(rng, text or "x"),
    "nul": _insert("\x00", "x: \x00", "\x00: 1"),
    "deep": lambda rng, text: (text + "x: " + "[" * rng.choice([50, 5000]) + "\n").encode(),
    "deep mapping": lambda rng, text: (text + "".join("  " * i + "x:\n" for i in range(rng.choice([20, 400])))).encode(),
    "long": lambda rng, text: (text + rng.choice(["x: ", "# ", "x", "? "]) + "a" * rng.choice([10_000, 2_000_000]) + "\n").encode(),
    "many": lambda rng, text: (text + "".join(f"x{i}: {i}\n" for i in range(rng.choice([1000, 4000])))).encode(),
    "interpolation": _insert("lr: ${lr}", "x: ${y}\ny: ${x}", "lr: ${oc.env:HOME}", "lr: ${", "lr: ${nothing}", "lr: ${nothing:1}", "lr: ${..updates}", "lr: ???"),
    "keys": _insert("5: a", "null: 1", "true: 1", "[a]: 1", "{a: 1}: 2", "? [1]\n: 2", "'': 1", "a.b: 1", ".: 1", "😀: 1", "lr : 1", "lr:1", "\u202elr: 1"),
    "defaults": _insert("defaults: 3", "defaults: []", "defaults: [missing]", "defaults: [{optimizer: adam}]", "defaults: [[a]]", "defaults: {a: b}",
                        "defaults: [override /optimizer: sgd]", "defaults: [{override /optimizer: nothing}]", "defaults: [mine]", "defaults: [_self_, _self_]",
                        "defaults: [/optimizer/sgd@_here_]", "defaults: [null]", "defaults: [{optimizer: null}]", "defaults: [optional nothing]", "defaults: [../config]"),
    "package": lambda rng, text: (rng.choice(["# @package _global_\n", "# @package a.b\n", "# @package\n", "# @package _group_\n", "# @package ${a}\n", "# @package \u202e\n"]) + text).encode(),
    "option": _insert("option: 3", "option: adma", "option: null", "option: [adam]", "option: auto", "option: ${a}"),
    "nothing": lambda rng, text: text.encode(),
}  # fmt: skip
