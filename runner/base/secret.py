"""Recognize secrets by name and shape, and keep them out of files and messages.

The tables of names and shapes at the end are the only ones; all other code uses them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


def is_secret_name(key: str) -> bool:
    """Return whether a part of the dotted key names a secret, whatever its value: api_key, hf_token, DB_PASSWORD."""
    return any(map(_is_secret_word, _WORD_END.split(key)))


def is_secret(key: str, value: Any) -> bool:
    """Return whether the key names a secret and the value is text; numbers, booleans and null are never secrets.

    An ambiguous name such as sort_key or pat counts as a secret only if its value looks random.
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
    """Return whether the text contains an API key of a known service, a private key, or a URL with a password."""
    return any(_shape(lead).search(text) is not None for lead in _SHAPES if lead in text)


def find_secrets_in_arguments(arguments: Iterable[str], options: Callable[[], Collection[str]] = tuple) -> list[str]:
    """Return the names of the arguments that contain a secret.

    The value of a secret environment variable counts as well, because the shell expands $MY_PASS before we see it.

    options  function that returns the names of all options, called only if such a value is found. A value that is also
             the name of an option is not treated as a secret. It is not redacted in files either, because files
             without it could not be read back
    """
    arguments = tuple(arguments)
    values = [
        value for value in _secret_values() if _is_strong(value) and any(value in argument for argument in arguments)
    ]
    _public.update({*values} & {*options()} if values else ())
    values = [value for value in values if value not in _public]
    names = [
        name
        for at, argument in enumerate(arguments)
        if (name := _secret_argument_name(argument, arguments[at + 1 : at + 2]) or _value_label(argument, values))
    ]
    return list(dict.fromkeys(name if _PLAIN_NAME.fullmatch(name) else "an argument" for name in names))


def find_secret_name(text: str) -> int | None:
    """Return the end offset of the first name that may denote a secret and is followed by a value, or None.

    Stricter than `find_secrets_in_arguments`: an invalid argument such as task.pwd=X may well hold a secret, and hiding
    X loses nothing.
    """
    for match in _VALUE_AFTER.finditer(text):
        if is_secret_name(match["name"]) or _may_be_secret(match["name"]) or _SOUNDS_SECRET.search(match["name"]):
            return match.end("name")
    return None


def looks_random(text: str) -> bool:
    """Return whether the text contains a long word of letters and digits, like an API key."""
    return _RANDOM.search(text) is not None


def find_secrets(tree: Any, lead: str = "") -> Iterator[str]:
    """Yield the dotted keys of a configuration tree that hold a secret."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            name = f"{lead}.{key}" if lead else str(key)
            if is_secret(str(key), value):
                yield name
            elif has_secret_shape(str(key)):
                yield f"a key of {lead or 'the file'}"
            else:
                yield from find_secrets(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from find_secrets(value, lead)
    elif isinstance(tree, str) and has_secret_shape(tree):
        yield lead


def redact(text: str) -> str:
    """Redact secrets in a text for a file or tracker that programs read back.

    Redacts texts with the shape of a secret, and the values of secret environment variables, including their escaped
    forms in JSON, HTML, Python and URLs. Does not redact purely alphabetic words, short words that contain a number,
    and option names: `postgres` may be both a password and a folder, `resnet50` both a password and a model.
    """
    for value, name in _secret_values().items():
        if value in text and _is_strong(value) and value not in _public:
            text = text.replace(value, f"({name})")
    return _redact_shapes(text)


def redact_message(text: str) -> str:
    """Redact secrets in a text for users only: screens, logs, exceptions, output of a task.

    Also redacts (1) values of secret environment variables that `redact` keeps, where they occur as whole words, and
    (2) X in `password=X`, if X is the value of a secret variable, or has at least 8 characters and contains a digit. A
    password that is a common word, such as `training`, is redacted only in `password=X`: redacting the word everywhere
    would reveal it.
    """
    if len(text) < _SHORTEST:
        return text
    text = redact(text)
    for value, name in _secret_values().items():
        if value in text and not _is_ordinary(value):
            instead = f"({name})".replace("\\", "/")
            text = re.sub(rf"(?:(?<![A-Za-z0-9])|(?<=[\[;\d]m)){re.escape(value)}(?![A-Za-z0-9])", instead, text)
    text = _OPTION_AND_VALUE.sub(_redact_named_value, text) if "--" in text else text
    lowered = text.lower()  # 100 times faster than the pattern
    return _NAME_AND_VALUE.sub(_redact_named_value, text) if any(lead in lowered for lead in _NAME_PREFIXES) else text


def sanitize(text: str) -> str:
    """Redact secrets and terminal control characters.

    Messages contain untrusted text, such as names in checkpoints and data, and library exceptions that quote a key.
    """
    text = redact_message(text)
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def drop_secrets(environment: Mapping[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment for a subprocess, without secrets except variables whose names start with `keep`."""
    return {
        name: value for name, value in environment.items() if name.startswith(keep) or not _is_secret_variable(name)
    }


def _is_secret_variable(name: str) -> bool:
    """Return whether the name of an environment variable suggests that it holds a secret."""
    return name not in _FOLDERS and (is_secret_name(name) or _may_be_secret(name))


def _secret_values() -> dict[str, str]:
    """Return the value of each secret variable -> its name, longest first.

    A value is remembered even after its variable is removed: a program may delete a password from its environment once
    it has read it.
    """
    global _values, _last_environment
    current = getattr(os.environ, "_data", None)  # os.environ decodes each name: 0.2 ms a call
    if current is not None and current == _last_environment:
        return _values
    scanned = dict(current or ())
    fresh: dict[str, str] = {}
    for name in os.environ:
        value = os.environ.get(name, "")  # another thread may have removed it
        if len(value) < _SHORTEST or (name, value) in _scanned:
            continue
        _scanned.add((name, value))
        is_secret_value = is_secret_name(name) or (_is_secret_variable(name) and looks_random(value))
        parts = [value] if is_secret_value else []
        for part in (*parts, *_URL_PASSWORD.findall(value)):
            fresh.update(dict.fromkeys((text for text in _encodings(part) if len(text) >= _SHORTEST), name))
    if fresh:
        longest_first = sorted((_values | fresh).items(), key=lambda item: -len(item[0]))
        _values = dict(longest_first)  # another thread may be reading the old one
    _last_environment = scanned
    return _values


def _encodings(value: str) -> Iterator[str]:
    """Yield the value as it is escaped in several formats."""
    import html
    import json
    import urllib.parse

    yield from (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    yield from (html.escape(value), urllib.parse.quote(value), urllib.parse.quote(value, safe=""))
    yield from (line for line in value.splitlines() if len(line) >= 16)  # lines of a private key


@cache
def _is_strong(value: str) -> bool:
    """Return whether a value can only be a secret: it is not a common word, a path, or a URL without a password."""
    is_mixed = re.search(r"[A-Za-z]", value) is not None and re.search(r"\d", value) is not None
    if not is_mixed or _is_path(value) or (len(value) <= _LONGEST_WORD and _WORD_WITH_NUMBER.fullmatch(value)):
        return False
    return "://" not in value or re.search(r"[@?]", value) is not None


@cache
def _is_ordinary(value: str) -> bool:
    return re.fullmatch(r"[A-Z]?[a-z]{7,15}|[A-Z]{8,16}", value) is not None or _is_path(value)


def _is_path(value: str) -> bool:
    try:
        return value.startswith(("/", "~", ".")) and Path(value).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long for a file name, or ~ of an unknown user
        return False


def _value_label(argument: str, values: Iterable[str]) -> str:
    """Return a label for an argument that contains one of the values; empty if it contains none."""
    held = next((value for value in values if value in argument), None)
    if held is None:
        return ""
    name = argument.partition("=")[0].lstrip("-+~")
    return name if held not in name and name != argument else " "


def _redact_shapes(text: str) -> str:
    for lead in _SHAPES:
        if lead in text:
            instead = "://(secret)@" if lead == "://" else f"{lead}(secret)" if lead[-1] in "=/ " else "(secret)"
            text = _shape(lead).sub(instead, text)
    return text


def _redact_named_value(match: re.Match[str]) -> str:
    before = _NAME_BEFORE.search(match.string[max(0, match.start() - 40) : match.start()])
    name = f"{before[0] if before else ''}{match['name']}".lstrip("-")
    value = match["value"].rstrip(".,:;")
    is_number = _NUMBER_OR_CONSTANT.fullmatch(value.replace(",", "")) is not None
    may_be_word = not re.search(r"\d", value) and value not in _secret_values()
    if is_number or may_be_word or not is_secret(name, value):
        return match[0]
    return f"{match['name']}{match['between']}(secret){match['value'][len(value) :]}"


def _secret_argument_name(argument: str, following: tuple[str, ...]) -> str:
    key, has_value, value = argument.partition("=")
    name = key.lstrip("-+~")
    is_given = value.lower() not in ("", "null") if has_value else bool(following)
    is_setting = has_value or argument.startswith("-") or following[:1] == ("=",)
    # in `{api_key:X}=1` the key contains the secret
    given = value if has_value and value else following[0] if following and following[0] != "=" else value
    is_plain = _PLAIN_NAME.fullmatch(name) is not None and _NUMBER_OR_CONSTANT.fullmatch(given) is not None
    is_named = is_secret_name(name) or is_secret(name, given.strip("'\""))
    if is_setting and (is_given or following) and is_named and not is_plain:
        return name
    if has_secret_shape(argument):
        return name if has_value and not has_secret_shape(name) else " "
    inner = _INNER_PAIR.findall(value) if value.lstrip().startswith(("{", "[")) else ()
    return next(
        (
            f"{name}.{key}"
            for key, item in inner
            if (is_secret_name(key) or is_secret(key, item)) and not _NUMBER_OR_CONSTANT.fullmatch(item)
        ),
        "",
    )


@cache
def _is_secret_word(word: str) -> bool:
    name = _snake(word)
    return _NAME.search(name) is not None and _HARMLESS_NAME.search(name) is None


@cache
def _may_be_secret(key: str) -> bool:
    names = map(_snake, _WORD_END.split(key))
    return any(_AMBIGUOUS_NAME.search(name) and not _HARMLESS_NAME.search(name) for name in names)


def _snake(word: str) -> str:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).replace("-", "_").lower()
    return re.sub(r"_?\d+$", "", snake)


_WORD_END = re.compile(r"[^A-Za-z0-9_-]+")
# Names of secrets, in snake_case, and exceptions with the same endings.
_NAME = re.compile(
    r"(?:passwords?|passwd|passphrase|passcode|secrets?|credentials?|api_?keys?|access_?key(?:_?id)?|private_?key"
    r"|secret_?key|account_?key|signing_?key|encryption_?key|auth_?key|service_?key|connection_?string)$"
    r"|(?:^|_)(?:pass|pw|psw|pswd|creds?|bearer|tokens?_?secret|token|auth|authorization|jwt|cookies?|dsn"
    r"|webhooks?|webhook_ur[il])$|_pwd$|(?:^|_)(?:ssh|master|licen[cs]e|deploy|openai)_?key$"
    r"|(?:^|_)(?:conn|connection)_str$"
    r"|(?:auth|access|api|bot|refresh|session|csrf|bearer|hf|gh|gl|github|gitlab|npm|wandb|slack)token$"
    r"|(?:^|_)(?:db|pg|my_?sql|postgres|redis|smtp|mail|ftp|ssh|user|admin|root|login)pass$"
    r"|(?:^|_)(?:github|gitlab|gh|git|azure|ado|access)_pat$|(?:^|_)wandb_?key$"
    r"|(?:^|_)wallet_mnemonic$|^(?:database_url|docker_auth_config|aws_bearer_token_bedrock)$"
)
_HARMLESS_NAME = re.compile(
    r"(?:^|_)(?:per|class|register|pad|end|eos|bos|start|stop|mask|unk|sep|cls|special|next|image|text|first|last"
    r"|newline)_token$"
    r"|(?:^|_)(?:cache|experiment|public)_key$"
    r"|(?:^|_)(?:low|high|band|all|per|by|single|one|two|three|multi|first|second|last|next|forward|backward)_pass$"
)
# secrets if the value looks random
_AMBIGUOUS_NAME = re.compile(
    r"_key$|(?:^|_)(?:pat|sig|signature|sid|session_id|sas|pin|pwd|otp|totp|pem|(?:slack|teams|discord)_?hook"
    r"|(?:otp|totp|wallet|hd)_seed|recovery_codes?"
    r"|(?:db|database|redis|mongo(?:db)?|postgres|pg|mysql|amqp|broker)_ur[il])$"
)
_FOLDERS = ("PWD", "OLDPWD")  # variables of every shell
_SOUNDS_SECRET = re.compile(r"(?i)(?:key|pwd|pass|pin|login)s?\d*$")  # for unknown or invalid keys
_VALUE_AFTER = re.compile(r"(?P<name>[A-Za-z][\w.-]*)(?:\s*[=:]\s*|\s+)(?=\S)")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{10,}")  # one word of letters and digits

_DIGIT = r"(?=[A-Za-z_-]*\d)"  # keys contain digits, words joined by dashes mostly do not
_WORD_DIGIT = r"(?=[A-Za-z]*\d+[A-Za-z])"  # a digit inside the first word
_WORD_BOUNDARY = "(?![A-Za-z0-9])"
_PASSWORD = r"""[^/\s@]+(?:@[^/\s@"'<>,;]+)*"""  # in a URL; an @ in it should be %40 and often is not
# Prefix of a secret -> pattern of the rest. Searching for the prefix first is 100 times as fast as the pattern.
_SHAPES: Mapping[str, str] = {
    "-----BEGIN ": r"[A-Z ]*PRIVATE KEY[A-Z ]*(?:-----)?(?:(?:\s|\\n)*[A-Za-z0-9+/=]{16,})*",
    "://": rf"(?:[^/\s:@?#]*:{_PASSWORD}|(?=[^/\s@]*\d)[\w.~%+-]{{20,}})@",
    "hooks.slack.com/": r"(?:services|workflows)/[\w/-]{8,}",
    "/api/webhooks/": r"\d+/[\w-]{8,}", "webhook.office.com/": r"webhookb2/[\w@/-]{20,}",
    # cloud providers
    **dict.fromkeys(("AKIA", "ASIA"), rf"[0-9A-Z]{{16}}{_WORD_BOUNDARY}"),
    "AIza": r"[\w-]{35}(?![\w-])", "ya29.": r"[\w-]{20,}", "GOCSPX-": r"[\w-]{20,}",
    "AccountKey=": r"[A-Za-z0-9+/%=]{20,}", "SharedAccessKey=": r"[A-Za-z0-9+/%=]{20,}",
    "sig=": r"[A-Za-z0-9+/%=_-]{20,}", "X-Amz-Signature=": r"[0-9a-f]{20,}", "X-Amz-Security-Token=": r"[\w%+/=-]{20,}",
    **dict.fromkeys(("dop_v1_", "doo_v1_", "dor_v1_"), r"[0-9a-f]{40,}"), "hvb.": r"[\w-]{20,}", "hvr.": r"[\w-]{20,}",
    "~": r"(?<=\dQ~)[\w~.-]{31,}",  # secret of an Azure application; the five characters before it identify the key
    "sbp_": r"[0-9a-f]{40}", "AGE-SECRET-KEY-": r"1[0-9A-Z]{50,}", "tskey-": r"(?:auth|api|client)-[\w-]{16,}",
    **dict.fromkeys(("pscale_tkn_", "pscale_pw_", "pscale_oauth_"), r"[\w.=-]{32,}"), "HRKU-": r"[\w-]{30,}",
    "pul-": rf"[0-9a-f]{{40}}{_WORD_BOUNDARY}", "AQVN": rf"{_DIGIT}[\w-]{{34,}}",
    "nfp_": rf"{_WORD_DIGIT}[A-Za-z0-9]{{36,}}",
    **dict.fromkeys(("ops_eyJ", "sntrys_eyJ"), r"[\w+/=-]{40,}"),
    **dict.fromkeys(("dp.pt.", "dp.st.", "dp.ct.", "dp.sa."), r"(?:[\w-]+\.)?[A-Za-z0-9]{40,}"),
    "dapi": rf"[0-9a-f]{{32}}(?:-\d)?{_WORD_BOUNDARY}", "hvs.": r"[\w-]{20,}",
    # models and their hosts
    "hf_": r"[A-Za-z0-9]{30,}", "api_org_": r"[A-Za-z0-9]{30,}", "wandb_v": r"\d_\w{30,}",
    "wandb login ": r"[0-9a-f]{40}",
    "sk-": r"(?<![_-]sk-)(?:(?:proj|svcacct|admin|ant|or)-[\w-]{20,}"  # else one word of letters and digits
    r"|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}(?![\w-]))",
    "nvapi-": rf"{_DIGIT}[\w-]{{20,}}", "gsk_": rf"{_DIGIT}[A-Za-z0-9]{{20,}}", "r8_": rf"{_DIGIT}[A-Za-z0-9]{{20,}}",
    "pplx-": r"[A-Za-z0-9]{32,}", "xai-": r"[A-Za-z0-9]{32,}", "rpa_": r"[A-Za-z0-9]{32,}",
    "csk-": rf"{_WORD_DIGIT}[A-Za-z0-9]{{40,}}", "fw_": rf"{_WORD_DIGIT}[A-Za-z0-9]{{22,}}{_WORD_BOUNDARY}",
    "tgp_v1_": r"[\w-]{40,}", "fm2_": rf"{_DIGIT}[A-Za-z0-9+/=]{{60,}}", ".atlasv1.": r"[\w-]{60,}",
    **dict.fromkeys(("kgat_", "KGAT_"), r"[0-9a-f]{32}"), "jina_": r"[A-Za-z0-9]{40,}",
    "tvly-": rf"(?:dev-|prod-)?{_WORD_DIGIT}[A-Za-z0-9]{{24,}}",
    **dict.fromkeys(("lsv2_pt_", "lsv2_sk_"), r"[0-9a-f]{32}_[0-9a-f]{10}"), "pcsk_": r"\w{40,}",
    # code, packages, messages, payments
    **dict.fromkeys(("dckr_pat_", "dckr_oat_"), r"[\w-]{20,}"), "ATBB": rf"{_DIGIT}[A-Za-z0-9]{{24,}}",
    "lin_api_": r"[A-Za-z0-9]{32,}", "ntn_": rf"{_DIGIT}[A-Za-z0-9]{{40,}}", "figd_": rf"{_DIGIT}[\w-]{{32,}}",
    "glsa_": r"[A-Za-z0-9]{32}_[0-9a-f]{8}", "glc_": rf"{_DIGIT}[A-Za-z0-9+/=]{{32,}}", "NRAK-": r"[A-Z0-9]{24,}",
    "PMAK-": r"[0-9a-f]{24}-[0-9a-f]{34}", "rubygems_": r"[0-9a-f]{48}", "SK": rf"[0-9a-f]{{32}}{_WORD_BOUNDARY}",
    "key-": rf"[0-9a-f]{{32}}{_WORD_BOUNDARY}", ":AA": r"(?<=\d{8}:AA)[\w-]{32,}",  # Mailgun; Telegram bots
    # Discord bots: a number in Base64, a time and a signature.
    **dict.fromkeys(
        ("MD", "MT", "Mj", "Mz", "ND", "NT", "Nj", "Nz", "OD", "OT"), r"[\w-]{20,26}\.[\w-]{6}\.[\w-]{27,}"
    ),
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{30,}"), "github_pat_": r"\w{30,}",
    **dict.fromkeys(("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "gloas-"), rf"{_DIGIT}[\w-]{{20,}}"),
    "npm_": r"[A-Za-z0-9]{30,}", "pypi-AgE": r"[\w-]{16,}", "ATATT3": r"[\w=-]{20,}",
    **dict.fromkeys(("xoxa-", "xoxb-", "xoxe-", "xoxo-", "xoxp-", "xoxr-", "xoxs-", "xapp-"), r"[A-Za-z0-9-]{20,}"),
    **dict.fromkeys(("sk_live_", "sk_test_", "rk_live_", "rk_test_"), r"[A-Za-z0-9]{16,}"),
    "tfp_": rf"{_WORD_DIGIT}[A-Za-z0-9]{{40,}}", "EAA": rf"{_WORD_DIGIT}[A-Za-z0-9]{{60,}}",
    "CFPAT-": rf"{_WORD_DIGIT}[A-Za-z0-9][\w-]{{39,}}",
    "whsec_": r"[A-Za-z0-9+/=]{20,}", "SG.": r"[\w-]{16,}\.[\w-]{16,}",
    **dict.fromkeys(("shpat_", "shpss_", "shpca_", "shppa_"), r"[0-9a-f]{32}"),
    "pat": rf"[A-Za-z0-9]{{14}}\.[0-9a-f]{{64}}{_WORD_BOUNDARY}", "sb_secret_": rf"{_DIGIT}[\w-]{{30,}}",
    "sl.": rf"(?:u\.)?{_WORD_DIGIT}[\w-]{{120,}}", "pa-": rf"{_WORD_DIGIT}[\w-]{{40,}}", "ATCTT3": r"[\w=-]{20,}",
    **dict.fromkeys(("sq0csp-", "sq0atp-", "EAAAE"), rf"{_DIGIT}[\w-]{{22,}}"), ":APA91b": r"[\w-]{100,}",
    **dict.fromkeys(("ak-", "as-"), rf"{_WORD_DIGIT}[A-Za-z0-9]{{22}}{_WORD_BOUNDARY}"),
    **dict.fromkeys(("curl -u ", "--user "), r"[^\s:'\"]+:[^\s'\"]{8,}"), "ABSK": rf"{_DIGIT}[A-Za-z0-9+/=]{{100,}}",
    **dict.fromkeys(("EZAK", "EZTK"), rf"{_DIGIT}[A-Za-z0-9]{{54}}"), "FLWSECK-": r"[0-9a-f]{32}-X",
    "FLWSECK_TEST-": r"\w{12,}",
    **dict.fromkeys(("duffel_live_", "duffel_test_"), r"[\w=-]{43}"), "dt0c01.": r"[A-Z0-9]{24}\.[A-Z0-9]{64}",
    **dict.fromkeys(("glagent-", "glffct-", "glimt-", "glsoat-", "glft-"), rf"{_DIGIT}[\w-]{{20,}}"),
    "CLOJARS_": r"[0-9a-f]{60}", "LTAI": rf"{_DIGIT}[A-Za-z0-9]{{20}}{_WORD_BOUNDARY}",
    "AKID": rf"{_WORD_DIGIT}[A-Za-z0-9]{{32}}{_WORD_BOUNDARY}", "cfut_": r"[A-Za-z0-9]{40,}",
    "v1.0-": r"[0-9a-f]{24}-[0-9a-f]{146}",
    "fo1_": rf"{_DIGIT}[\w-]{{43}}", **dict.fromkeys(("fm1r_", "fm1a_"), rf"{_DIGIT}[A-Za-z0-9+/=]{{60,}}"),
    "frio_": r"[A-Za-z0-9]{30,}", "gAAAAAB": rf"{_DIGIT}[\w-]{{80,}}=*", "hf_oauth_": r"[\w-]{30,}",
    **dict.fromkeys(("phx_", "phc_"), rf"{_DIGIT}[A-Za-z0-9]{{40,}}"), "p8e-": rf"{_WORD_DIGIT}[A-Za-z0-9]{{32}}",
    **dict.fromkeys(("bkua_", "sgp_", "shippo_live_", "shippo_test_"), r"[0-9a-f]{40}"), "rdme_": r"[a-z0-9]{70}",
    "re_": r"(?=\w*\d)[A-Za-z0-9]{8}_[A-Za-z0-9]{20,}", "secret_": rf"{_WORD_DIGIT}[A-Za-z0-9]{{43}}{_WORD_BOUNDARY}",
    **dict.fromkeys(("sntryu_", "sntrya_"), r"[0-9a-f]{64}"), "snyk_uat.": r"[0-9a-zA-Z]{8}\.[\w-]{40,}",
    **dict.fromkeys(("sk_prod_", "rk_prod_"), r"[A-Za-z0-9]{16,}"), "shpua_": r"[0-9a-f]{32}",
    "vcp_": rf"{_DIGIT}[A-Za-z0-9]{{24,}}",
    **dict.fromkeys(("xkeysib-", "xsmtpsib-"), r"[0-9a-f]{64}-[A-Za-z0-9]{16}"), "xoxd-": r"[\w%+/=-]{20,}",
    "nk-": rf"{_WORD_DIGIT}[\w-]{{43}}", "fc-": rf"[0-9a-f]{{32}}{_WORD_BOUNDARY}",
    "sess-": rf"{_WORD_DIGIT}[A-Za-z0-9]{{40}}",
    "ctx7sk-": r"[0-9a-f-]{32,}", "bb_live_": r"[\w-]{24,}", "aio_": rf"{_WORD_DIGIT}[A-Za-z0-9]{{28}}{_WORD_BOUNDARY}",
    "Token ": rf"[0-9a-f]{{40}}{_WORD_BOUNDARY}", "dkea": rf"[0-9a-f]{{32}}{_WORD_BOUNDARY}",
    "eyJ": r"[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)*",  # a JSON Web Token
    "Bearer ": r"(?=[A-Za-z._~+/-]*\d)[A-Za-z0-9._~+/-]{12,}=*", "Basic ": r"(?=[A-Za-z+/]*\d)[A-Za-z0-9+/]{12,}=*",
}  # fmt: skip


# A letter or digit before a word may be the end of an escape sequence: of a newline, a terminal color, a URL, JSON.
_ESCAPES = (r"\\[nrt]", r"[\[;\d]m", "%[0-9A-Fa-f]{2}", r"\\x[0-9a-fA-F]{2}", r"\\u[0-9a-fA-F]{4}")


@cache
def _shape(lead: str) -> re.Pattern[str]:
    """Return the compiled pattern of a shape, anchored at a word boundary; lazy, since a process needs few of them."""
    escaped = re.escape(lead)
    starts = "|".join(f"(?<={before}{escaped})" for before in _ESCAPES)
    is_start = f"(?:(?<![A-Za-z0-9]{escaped})|{starts})" if lead[0].isalnum() else ""
    return re.compile(f"{escaped}{is_start}{_SHAPES[lead]}")


# NAME=value, NAME: value, "NAME": "value"; the name may start before the match
_NAME_PREFIXES = (
    "pass", "pw", "psw", "secret", "token", "cred", "auth", "cookie", "bearer", "jwt", "dsn", "hook", "key", "pat",
    "sig", "sid", "string",
)  # fmt: skip
_COLOR = r"(?:\x1b\[[\d;]{0,12}m)?"  # terminal escape
_NAME_AND_VALUE = re.compile(
    rf"(?P<name>(?:{'|'.join(_NAME_PREFIXES)})\w{{0,20}})"
    rf"(?P<between>(?:\\?[\"'])?{_COLOR}\s{{0,3}}[=:]{_COLOR}\s{{0,3}}{_COLOR}(?:b?\\?[\"'])?(?:(?:Bearer|Basic) )?)"
    r"(?P<value>[^\s\\\"'&;(){}\[\]<>\x1b]{8,200})",
    re.IGNORECASE,
)
# --name value, on a command line or in a list of its arguments
_OPTION_AND_VALUE = re.compile(
    r"(?P<name>--[\w-]{2,40})(?P<between>[\"']?,?\s{1,3}[\"']?)(?P<value>[^\s\\\"'&;(){}\[\]<>\x1b]{8,200})"
)
_NAME_BEFORE = re.compile(r"(?:(?<=\\[nrt])[\w-]*|(?<!\\)[\w-]*)$")
_URL_PASSWORD = re.compile(rf"://[^/\s:@?#]*:({_PASSWORD})@")
_INNER_PAIR = re.compile(r"""["']?([A-Za-z_][\w.-]*)["']?\s*:\s*["']?(?=([^\s,}\]"']+))""")
# A float has 17 digits, plus leading zeros; a longer integer may be a secret.
_NUMBER_OR_CONSTANT = re.compile(
    r"(?i)null|true|false|nan|[-+]?(?:inf(?:inity)?|(?:\d{1,12}|\d{0,20}\.\d{1,24})(?:e[-+]?\d{1,3})?)"
)
# C0 and C1 controls except tab and newline, and marks that change the text direction
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PLAIN_NAME = re.compile(r"[\w.@/-]+")
_SHORTEST = 8  # minimum length of a value to search for: shorter ones would match in ordinary words
_LONGEST_WORD = 12
_WORD_WITH_NUMBER = re.compile(r"[A-Z]?[a-z]{2,}[_-]?\d{1,3}(?:[_-]?[a-z]+)?")  # resnet50, adamw8bit, gpt2-medium
_scanned: set[tuple[str, str]] = set()
_values: dict[str, str] = {}  # value -> the variable that held it
_public: set[str] = set()  # values of secret variables that are also names of options
_last_environment: dict[object, object] | None = None  # the environment at the last scan
