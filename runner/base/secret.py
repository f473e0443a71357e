"""Secrets: the names and shapes by which they are known, and the filters that keep them out of files and messages.

The two tables at the end, of names and of shapes, are the only ones; everything else asks them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from runner.base.errors import ConfigError, Problem


def is_secret_name(key: str) -> bool:
    """Tell whether a part of the dotted key names a secret whatever text it holds: api_key, hf_token, DB_PASSWORD."""
    return any(map(_is_secret_word, _WORD_END.split(key)))


def is_secret(key: str, value: Any) -> bool:
    """Tell whether the key names a secret and the value is text; a number, a switch or nothing is no secret.

    A name such as sort_key or pat may be a secret or not: it is one where its text looks random.
    """
    holds = _holds_text if is_secret_name(key) else _looks_random if _may_be_secret(key) else None
    return holds is not None and _any_leaf(value, holds)


def _any_leaf(value: Any, holds: Callable[[Any], bool]) -> bool:
    if isinstance(value, Mapping):
        return any(_any_leaf(item, holds) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_any_leaf(item, holds) for item in value)
    return holds(value)


def _holds_text(value: Any) -> bool:
    return value not in (None, "") and not isinstance(value, (bool, int, float))


def _looks_random(value: Any) -> bool:
    return isinstance(value, str) and looks_random(value)


def has_secret_shape(text: str) -> bool:
    """Tell whether the text holds a key of a known service, a private key, or an address with a password in it."""
    return any(_shape(lead).search(text) is not None for lead in _OF_SERVICES if lead in text)


def refuse_secrets(words: Iterable[str], options: Callable[[], Collection[str]] = tuple) -> None:
    """Raise ConfigError where words of a command line give a secret; the message does not repeat it.

    A value that a secret variable of the environment has is one too: the shell replaces $MY_PASS before we see it.

    options  returns the names of options, called only where such a value is found: one that is also the name of an
             option is none, and stays in files from now on, which could not be read back without it
    """
    words = tuple(words)
    values = [value for value in _secret_values() if _is_strong(value) and any(value in word for word in words)]
    _public.update({*values} & {*options()} if values else ())
    values = [value for value in values if value not in _public]
    found = [
        name
        for at, word in enumerate(words)
        if (name := _secret_of(word, words[at + 1 : at + 2]) or _name_of_value(word, values))
    ]
    found = [name if _PLAIN.fullmatch(name) else "a word of the command line" for name in found]
    if found:
        raise ConfigError(Problem(_WHAT, name, _FIX_OF_WORDS) for name in dict.fromkeys(found))


def without_value_of_secret(problem: Problem) -> Problem:
    """Return the problem of a word such as task.pwd=X without X, where the name may be that of a secret.

    Names that are refused at once are not enough here: a word that is wrong may well be one, and nothing is lost.
    """
    for named in _VALUE_AFTER.finditer(problem.where):
        if is_secret_name(named["name"]) or _may_be_secret(named["name"]) or _SOUNDS_SECRET.search(named["name"]):
            fix = f"{problem.fix}\n" if problem.fix else ""
            return Problem(problem.what, problem.where[: named.end("name")], f"{fix}{_FIX_OF_NAMES}")
    return problem


def looks_random(text: str) -> bool:
    """Tell whether the text holds a long word of letters and digits, as keys of services are."""
    return _RANDOM.search(text) is not None


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


def redacted(text: str) -> str:
    """Return the text without secrets, for a file or a tracker that programs read back.

    Secrets are what has the shape of one, and what secret variables of the environment hold, as it is and as JSON,
    HTML, Python and addresses write it. Words of letters alone, short ones with a number and the names of options are
    left: `postgres` may be a password and a folder, `resnet50` a password and a model.
    """
    for value, name in _secret_values().items():
        if value in text and _is_strong(value) and value not in _public:
            text = text.replace(value, f"({name})")
    return _without_shapes(text)


def redacted_message(text: str) -> str:
    """Return the text without secrets, for what only people read: screens, logs, exceptions, what a task prints.

    Besides what `redacted` replaces: secrets of the environment that it leaves, where they stand as a word, and X of
    `password=X` where a secret variable holds X, or X has 8 characters and a digit. An ordinary word such as
    `training` stays elsewhere: with it replaced throughout, readers would learn what the password is.
    """
    if len(text) < _SHORTEST:
        return text
    text = redacted(text)
    for value, name in _secret_values().items():
        if value in text and not _is_ordinary(value):
            instead = f"({name})".replace("\\", "/")
            text = re.sub(rf"(?:(?<![A-Za-z0-9])|(?<=[\[;\d]m)){re.escape(value)}(?![A-Za-z0-9])", instead, text)
    lowered = text.lower()  # the pattern takes a hundred times as long
    return _NAMED.sub(_without_value, text) if any(lead in lowered for lead in _NAMES_BEGIN) else text


def fit_to_show(text: str) -> str:
    """Return the text without secrets and without characters that steer a terminal.

    Messages hold what strangers wrote: names in checkpoints and data, exceptions of libraries that repeat a key.
    """
    text = redacted_message(text)
    return _STEERING.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def without_secrets(environment: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return an environment for a process that needs none of the secrets but those whose names begin with `keep`."""
    return {
        name: value for name, value in environment.items() if name.startswith(keep) or not _is_secret_variable(name)
    }


def _is_secret_variable(name: str) -> bool:
    """Tell whether a variable of the environment holds a secret by its name; there every key is one."""
    return is_secret_name(name) or _may_be_secret(name)


def _secret_values() -> dict[str, str]:
    """Return each text that a secret variable holds, the longest first, with the variable's name.

    One that was seen stays known: a program may take a password out of its environment once it has read it.
    """
    global _known, _seen
    current = getattr(os.environ, "_data", None)  # reading os.environ itself decodes each name: 0.2 ms a call
    if current is not None and current == _seen:
        return _known
    looked_at = dict(current or ())
    fresh: dict[str, str] = {}
    for name in os.environ:
        value = os.environ.get(name, "")  # another thread may have removed it
        if len(value) < _SHORTEST or (name, value) in _looked_at:
            continue
        _looked_at.add((name, value))
        parts = [value] if _is_secret_variable(name) else []
        for part in (*parts, *_PASSWORD_OF_ADDRESS.findall(value)):
            fresh.update(dict.fromkeys((way for way in _ways_to_write(part) if len(way) >= _SHORTEST), name))
    if fresh:
        longest_first = sorted((_known | fresh).items(), key=lambda item: -len(item[0]))
        _known = dict(longest_first)  # another thread may be reading the one before
    _seen = looked_at
    return _known


def _ways_to_write(value: str) -> Iterator[str]:
    """Yield the value as messages and files of several formats repeat it."""
    import html
    import json
    import urllib.parse

    yield from (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    yield from (html.escape(value), urllib.parse.quote(value), urllib.parse.quote(value, safe=""))
    yield from (line for line in value.splitlines() if len(line) >= 16)  # of a private key


@cache
def _is_strong(value: str) -> bool:
    """Tell whether a value of the environment can be nothing else but a secret: no word, path or open address."""
    is_mixed = re.search(r"[A-Za-z]", value) is not None and re.search(r"\d", value) is not None
    if not is_mixed or _is_path(value) or (len(value) <= _LONGEST_WORD and _WORD_WITH_NUMBER.fullmatch(value)):
        return False
    return "://" not in value or re.search(r"[@?]", value) is not None


@cache
def _is_ordinary(value: str) -> bool:
    """Tell whether a value of the environment is a word of a language, or a path: no text can do without those."""
    return re.fullmatch(r"[A-Z]?[a-z]{7,15}|[A-Z]{8,16}", value) is not None or _is_path(value)


def _is_path(value: str) -> bool:
    try:
        return value.startswith(("/", "~", ".")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a name, or ~ of nobody
        return False


def _name_of_value(word: str, values: Iterable[str]) -> str:
    """Return what to call a word that holds one of the values; empty where it holds none."""
    held = next((value for value in values if value in word), None)
    if held is None:
        return ""
    name = word.partition("=")[0].lstrip("-+~")
    return name if held not in name and name != word else " "


def _without_shapes(text: str) -> str:
    for lead in _OF_SERVICES:
        if lead in text:
            instead = "://(secret)@" if lead == "://" else f"{lead}(secret)" if lead[-1] in "=/ " else "(secret)"
            text = _shape(lead).sub(instead, text)
    return text


def _without_value(match: re.Match[str]) -> str:
    """Return `NAME=value` without its value if the name is one of a secret."""
    before = _NAME_BEFORE.search(match.string[max(0, match.start() - 40) : match.start()])
    name = f"{before[0] if before else ''}{match['name']}"
    value = match["value"].rstrip(".,:;")
    is_number = _NO_SECRET.fullmatch(value.replace(",", "")) is not None
    may_be_word = not re.search(r"\d", value) and value not in _secret_values()
    if is_number or may_be_word or not is_secret(name, value):
        return match[0]
    return f"{match['name']}{match['between']}(secret){match['value'][len(value) :]}"


def _secret_of(word: str, following: tuple[str, ...]) -> str:
    """Return the name under which a word gives a secret, empty where it gives none."""
    key, has_value, value = word.partition("=")
    name = key.lstrip("-+~")
    is_given = value.lower() not in ("", "null") if has_value else bool(following)
    is_setting = has_value or word.startswith("-") or following[:1] == ("=",)
    # `{api_key:X}=1` has the secret in its name
    given = value if has_value and value else following[0] if following and following[0] != "=" else value
    is_plain = _PLAIN.fullmatch(name) is not None and _NO_SECRET.fullmatch(given) is not None
    is_named = is_secret_name(name) or is_secret(name, given.strip("'\""))
    if is_setting and (is_given or following) and is_named and not is_plain:
        return name
    if has_secret_shape(word):
        return name if has_value and not has_secret_shape(name) else " "
    inner = _INNER.findall(value) if value.lstrip().startswith(("{", "[")) else ()
    return next(
        (
            f"{name}.{key}"
            for key, item in inner
            if (is_secret_name(key) or is_secret(key, item)) and not _NO_SECRET.fullmatch(item)
        ),
        "",
    )


@cache
def _is_secret_word(word: str) -> bool:
    name = _snake(word)
    return _NAME.search(name) is not None and _NO_NAME.search(name) is None


@cache
def _may_be_secret(key: str) -> bool:
    return any(_MAYBE.search(_snake(word)) is not None for word in _WORD_END.split(key))


def _snake(word: str) -> str:
    """Return the word as snake_case, without the number at its end: apiKey2 -> api_key."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).replace("-", "_").lower()
    return re.sub(r"_?\d+$", "", snake)


_WORD_END = re.compile(r"[^A-Za-z0-9_-]+")
# Names of secrets, in snake_case, and those that end in the same way and are none.
_NAME = re.compile(
    r"(?:passwords?|passwd|passphrase|passcode|secrets?|credentials?|api_?keys?|access_?key(?:_?id)?|private_?key"
    r"|secret_?key|account_?key|signing_?key|encryption_?key|auth_?key|service_?key|connection_?string)$"
    r"|(?:^|_)(?:pass|pw|psw|pswd|creds?|bearer|tokens?_?secret|token|auth|authorization|jwt|cookies?|dsn"
    r"|webhooks?|webhook_ur[il])$|_pwd$"
    r"|(?:auth|access|api|bot|refresh|session|csrf|bearer|hf|github|wandb)token$"
    r"|(?:^|_)(?:db|pg|my_?sql|postgres|redis|smtp|mail|ftp|ssh|user|admin|root|login)pass$"
    r"|(?:^|_)(?:github|gitlab|gh|git|azure|ado|access)_pat$|(?:^|_)wandb_?key$"
    r"|^(?:database_url|docker_auth_config|aws_bearer_token_bedrock)$"
)
_NO_NAME = re.compile(
    r"(?:^|_)(?:per|class|register|pad|end|eos|bos|start|stop|mask|unk|sep|cls|special|next|image|text|first|last"
    r"|newline)_token$"
    r"|(?:^|_)(?:low|high|band|all|per|by|single|one|two|three|multi|first|second|last|next|forward|backward)_pass$"
)
_MAYBE = re.compile(r"_key$|(?:^|_)(?:pat|sig|signature|sid)$")  # secrets where their value looks random
_SOUNDS_SECRET = re.compile(r"(?i)(?:key|pwd|pass|pin|login)s?\d*$")  # where a setting of this name is unknown or wrong
_VALUE_AFTER = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?:\s*[=:]\s*|\s+)(?=\S)")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{10,}")  # one word of letters and digits

_DIGIT = r"(?=[A-Za-z_-]*\d)"  # a key has digits, words with dashes between them mostly have none
_NOT_MORE = "(?![A-Za-z0-9])"
_PASSWORD = r"""[^/\s@]+(?:@[^/\s@"'<>,;]+)*"""  # of an address; an @ in it should be %40 and often is not
# How a secret begins -> the rest of it. The beginning is searched for first, a hundred times as fast as the pattern.
_OF_SERVICES: Mapping[str, str] = {
    "-----BEGIN ": r"[A-Z ]*PRIVATE KEY[A-Z ]*(?:-----)?(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})*",
    "://": rf"(?:[^/\s:@?#]*:{_PASSWORD}|(?=[^/\s@]*\d)[\w.~%+-]{{20,}})@",
    "hooks.slack.com/": r"(?:services|workflows)/[\w/-]{8,}",
    "/api/webhooks/": r"\d+/[\w-]{8,}",
    # cloud providers
    **dict.fromkeys(("AKIA", "ASIA"), rf"[0-9A-Z]{{16}}{_NOT_MORE}"),
    "AIza": r"[\w-]{35}(?![\w-])", "ya29.": r"[\w-]{20,}", "GOCSPX-": r"[\w-]{20,}",
    "AccountKey=": r"[A-Za-z0-9+/%=]{20,}", "SharedAccessKey=": r"[A-Za-z0-9+/%=]{20,}",
    "sig=": r"[A-Za-z0-9+/%=_-]{20,}", "X-Amz-Signature=": r"[0-9a-f]{20,}", "X-Amz-Security-Token=": r"[\w%+/=-]{20,}",
    "dop_v1_": r"[0-9a-f]{40,}", "dapi": rf"[0-9a-f]{{32}}(?:-\d)?{_NOT_MORE}", "hvs.": r"[\w-]{20,}",
    # models and their hosts
    "hf_": r"[A-Za-z0-9]{30,}", "api_org_": r"[A-Za-z0-9]{30,}", "wandb_v": r"\d_\w{30,}",
    "wandb login ": r"[0-9a-f]{40}",
    "sk-": r"(?<![_-]sk-)(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}"  # else one word of letters and digits
    r"|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}(?![\w-]))",
    "nvapi-": rf"{_DIGIT}[\w-]{{20,}}", "gsk_": rf"{_DIGIT}[A-Za-z0-9]{{20,}}", "r8_": rf"{_DIGIT}[A-Za-z0-9]{{20,}}",
    "pplx-": r"[A-Za-z0-9]{32,}", "xai-": r"[A-Za-z0-9]{32,}", "rpa_": r"[A-Za-z0-9]{32,}",
    # code, packages, messages, payments
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{30,}"), "github_pat_": r"\w{30,}",
    **dict.fromkeys(("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "gloas-"), rf"{_DIGIT}[\w-]{{20,}}"),
    "npm_": r"[A-Za-z0-9]{30,}", "pypi-AgE": r"[\w-]{16,}", "ATATT3": r"[\w=-]{20,}",
    **dict.fromkeys(("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xapp-"), r"[A-Za-z0-9-]{20,}"),
    **dict.fromkeys(("sk_live_", "sk_test_", "rk_live_", "rk_test_"), r"[A-Za-z0-9]{16,}"),
    "whsec_": r"[A-Za-z0-9+/=]{20,}", "SG.": r"[\w-]{16,}\.[\w-]{16,}", "shpat_": r"[0-9a-f]{32}",
    "eyJ": r"[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)*",  # a JSON Web Token
    "Bearer ": r"(?=[A-Za-z._~+/-]*\d)[A-Za-z0-9._~+/-]{12,}=*", "Basic ": r"(?=[A-Za-z+/]*\d)[A-Za-z0-9+/]{12,}=*",
}  # fmt: skip


# A letter or digit before a word may end an escape: of a line end, of a color of the terminal, of an address, of JSON.
_ESCAPES = (r"\\[nrt]", r"[\[;\d]m", "%[0-9A-Fa-f]{2}", r"\\x[0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}")


@cache
def _shape(lead: str) -> re.Pattern[str]:
    """Return the pattern of a shape; a lead that is a word begins no earlier. Most are never needed in a process."""
    escaped = re.escape(lead)
    starts = "|".join(f"(?<={before}{escaped})" for before in _ESCAPES)
    is_start = f"(?:(?<![A-Za-z0-9]{escaped})|{starts})" if lead[0].isalnum() else ""
    return re.compile(f"{escaped}{is_start}{_OF_SERVICES[lead]}")


# NAME=value, NAME: value, "NAME": "value"; the name may begin before what is matched
_NAMES_BEGIN = (
    "pass", "pw", "psw", "secret", "token", "cred", "auth", "cookie", "bearer", "jwt", "dsn", "hook", "key", "pat",
    "sig", "sid", "string",
)  # fmt: skip
_COLOR = r"(?:\x1b\[[\d;]{0,12}m)?"  # of the terminal
_NAMED = re.compile(
    rf"(?P<name>(?:{'|'.join(_NAMES_BEGIN)})\w{{0,20}})"
    rf"(?P<between>(?:\\?[\"'])?{_COLOR}\s{{0,3}}[=:]{_COLOR}\s{{0,3}}{_COLOR}(?:b?\\?[\"'])?(?:(?:Bearer|Basic) )?)"
    r"(?P<value>[^\s\\\"'&;(){}\[\]<>\x1b]{8,200})",
    re.IGNORECASE,
)
_NAME_BEFORE = re.compile(r"(?:(?<=\\[nrt])[\w-]*|(?<!\\)[\w-]*)$")
_PASSWORD_OF_ADDRESS = re.compile(rf"://[^/\s:@?#]*:({_PASSWORD})@")
_INNER = re.compile(r"""["']?([A-Za-z_][\w.-]*)["']?\s*:\s*["']?(?=([^\s,}\]"']+))""")
# A float has 17 digits, and more zeros in front of them; a longer whole number may be a secret.
_NO_SECRET = re.compile(
    r"(?i)null|true|false|nan|[-+]?(?:inf(?:inity)?|(?:\d{1,12}|\d{0,20}\.\d{1,24})(?:e[-+]?\d{1,3})?)"
)
# C0 and C1 without tab and line end, and the marks that turn the direction of text around
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PLAIN = re.compile(r"[\w.@/-]+")
_SHORTEST = 8  # characters of a value that is searched for: a shorter one would be found in innocent words
_WHAT = "is a secret, and those are neither typed nor kept in a configuration"
_FIX = "take it out: wandb finds WANDB_API_KEY or ~/.netrc by itself, and a task reads its own environment"
_FIX_OF_NAMES = "a secret is not typed: a task reads it from its own environment"
_FIX_OF_WORDS = f"{_FIX}; then change it, for the shell remembers it"
_LONGEST_WORD = 12
_WORD_WITH_NUMBER = re.compile(r"[A-Z]?[a-z]{2,}[_-]?\d{1,3}(?:[_-]?[a-z]+)?")  # resnet50, adamw8bit, gpt2-medium
_looked_at: set[tuple[str, str]] = set()
_known: dict[str, str] = {}  # text -> the variable that held it
_public: set[str] = set()  # values of secret variables that are names of options
_seen: dict[object, object] | None = None  # the environment that was last looked at
