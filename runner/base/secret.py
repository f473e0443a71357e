"""Secrets: by which names and shapes they are known, and the rule that none is typed, stored or shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from runner.base.errors import ConfigError, Problem


def is_secret_name(key: str) -> bool:
    """Tell whether a part of the dotted key is what people call a secret: api_key, hf_token, DB_PASSWORD, ..."""
    return any(
        _NAME.search(word) is not None and _TEXT_TOKEN.search(word) is None
        for word in map(_snake, re.split(r"[^A-Za-z0-9_-]+", key))
    )


def is_secret(key: str, value: Any) -> bool:
    """Tell whether a text stands under the name of a secret; a number, a switch or nothing is none."""
    return is_secret_name(key) and _holds_text(value)


def _holds_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_text, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_text, value))
    return value not in (None, "") and not isinstance(value, (bool, int, float))


def has_secret_shape(text: str) -> bool:
    """Tell whether the text holds a key of a known service, a private key, or an address with a password in it."""
    return any(lead in text for lead in _LEADS) and _SHAPE.search(text) is not None  # a hundred times as fast


def refuse_secrets(words: Iterable[str]) -> None:
    """Raise ConfigError where words of a command line give a secret; the message does not repeat it."""
    words = tuple(words)
    found = [name for at, word in enumerate(words) if (name := _secret_of(word, words[at + 1 : at + 2]))]
    found = [name if _PLAIN.fullmatch(name) else "a word of the command line" for name in found]
    if found:
        raise ConfigError(Problem(_WHAT, name, _FIX_OF_WORDS) for name in dict.fromkeys(found))


def secrets_in(tree: Any, lead: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration's tree under which a secret stands."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{lead}.{key}" if lead else str(key)
            if is_secret(str(key), value):
                yield name
            elif has_secret_shape(str(key)):
                yield f"a key of {lead or 'the file'}"
            else:
                yield from secrets_in(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from secrets_in(value, lead)
    elif isinstance(tree, str) and has_secret_shape(tree):
        yield lead


def secret_problems(tree: Any, where: str) -> list[Problem]:
    """Return a problem for each secret in the tree of the file `where`, which do not repeat it."""
    return [Problem(_WHAT, f"{where}: {name}", _FIX) for name in dict.fromkeys(secrets_in(tree))]


def fit_to_show(text: str) -> str:
    """Return the text without secrets of the environment and without characters that steer a terminal.

    Messages hold what strangers wrote: names in checkpoints and data, exceptions of libraries that repeat a key.
    """
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _is_secret_variable(name):
            text = text.replace(value, f"({name})")
    text = _SHAPE.sub(lambda match: "://(secret)@" if match[0].startswith("://") else "(secret)", text)
    return _STEERING.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def without_secrets(environment: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return an environment for a process that needs none of the secrets but those whose names begin with `keep`."""
    return {
        name: value for name, value in environment.items() if name.startswith(keep) or not _is_secret_variable(name)
    }


def _is_secret_variable(name: str) -> bool:
    """Tell whether a variable of the environment holds a secret by its name; there every key is one."""
    return is_secret_name(name) or name.endswith(("_KEY", "_JWT"))


def _secret_of(word: str, following: tuple[str, ...]) -> str:
    """Return the name under which a word gives a secret, empty where it gives none."""
    key, has_value, value = word.partition("=")
    name = key.lstrip("-+~")
    is_given = value.lower() not in ("", "null") if has_value else bool(following)
    is_setting = has_value or word.startswith("-") or following[:1] == ("=",)
    # `{api_key:X}=1` has the secret in its name
    given = value if has_value and value else following[0] if following and following[0] != "=" else value
    is_plain = _PLAIN.fullmatch(name) is not None and _NO_SECRET.fullmatch(given) is not None
    if is_setting and (is_given or following) and is_secret_name(name) and not is_plain:
        return name
    if has_secret_shape(word):
        return name if has_value and not has_secret_shape(name) else " "
    inner = _INNER.findall(value) if value.lstrip().startswith(("{", "[")) else ()
    return next((f"{name}.{key}" for key, item in inner if is_secret_name(key) and not _NO_SECRET.fullmatch(item)), "")


def _snake(word: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).replace("-", "_").lower()


_NAME = re.compile(
    r"(?:^|_)(?:passwords?|passwd|passphrase|secrets?|credentials?|tokens?_?secret|bearer|token|auth"
    r"|api_?keys?|access_?key(?:_?id)?|private_?key|secret_?key|jwt|connection_?string)$|_pwd$"
    r"|(?:^|_)(?:db|pg|my_?sql|postgres|redis|smtp|mail|ftp|ssh|user|admin|root|login)_?(?:pass|password)$"
    r"|(?:^|_)(?:github|gitlab|gh|git|azure|ado)_pat$"
    r"|^(?:database_url|docker_auth_config|aws_bearer_token_bedrock)$"
)
_TEXT_TOKEN = re.compile(
    r"(?:^|_)(?:per|class|register|pad|end|eos|bos|start|stop|mask|unk|sep|cls|special|next|image|text|first|last"
    r"|newline)_token$"
)
_SHAPE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@?#]*:[^/\s@]+@"
    r"|\b(?:hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}"
    r"|AKIA[0-9A-Z]{16}|xox[abpr]-[A-Za-z0-9-]{20,}|glpat-[\w-]{20,}|wandb_v\d_\w{30,})\b"
    r"|(?<![\w-])sk-(?:(?:proj|svcacct|admin|ant)-[A-Za-z0-9_-]{20,}"  # else one word of letters and digits
    r"|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}(?![\w-]))"
)
# Each alternative of the shape has one of these in it.
_LEADS = ("-----BEGIN ", "://", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "AKIA", "xox", "glpat-",
          "wandb_v", "sk-")  # fmt: skip
_INNER = re.compile(r"""["']?([A-Za-z_][\w.-]*)["']?\s*:\s*["']?(?=([^\s,}\]"']+))""")
_NO_SECRET = re.compile(r"(?i)null|true|false|[-+]?(?:\d{1,12}|\d{0,12}\.\d{1,12})(?:e[-+]?\d{1,3})?")
# C0 and C1 without tab and line end, and the marks that turn the direction of text around
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"[\w.@/-]+")
_SHORTEST = 8  # characters of a value that is searched for: a shorter one would be found in innocent words
_WHAT = "is a secret, and those are neither typed nor kept in a configuration"
_FIX = "take it out: wandb finds WANDB_API_KEY or ~/.netrc by itself, and a task reads its own environment"
_FIX_OF_WORDS = f"{_FIX}; then change it, for the shell remembers it"
