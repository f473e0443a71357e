"""Secrets as canaries: none is found in anything a run leaves, says or starts; and nobody else can read what it leaves."""

from __future__ import annotations

import gzip
import os
import random
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner.base import secret
from runner.base.errors import ConfigError
from runner.base.secret import (
    fit_to_show,
    has_secret_shape,
    is_secret_name,
    refuse_secrets,
    secrets_in,
    without_secrets,
)
from tests.faults.tallies import IS_LONG, SEED, Tally
from tests.forkserver import Ended, ForkServer

# ruff: noqa: E501 - texts are compared to the letter

TASK = Path(__file__).with_name("task_to_attack.py")
NAMES = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "MY_PASSWORD",
    "OPENAI_API_KEY",
    "SLURM_JWT",
)

# A task that fails as clients of services do: with the key in the message, and in the source line of the traceback.
FAILS = TASK.read_text().replace("import torch\n", "import os\n\nimport torch\n", 1).replace(
    "        points, wanted = batch\n",
    "        points, wanted = batch\n        key = os.environ['MY_PASSWORD']\n"
    "        if os.environ.get('FAIL'):\n            raise ConnectionError(f'401: {key} is not valid at https://host/?token={key}')\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def canaries() -> dict[str, str]:
    return {name: f"canary{secrets.token_hex(17)}" for name in (*NAMES, "netrc", "remote")}


@pytest.fixture(scope="module")
def open_handed() -> Iterator[ForkServer]:
    """Commands of a person whose umask keeps nobody out."""
    before = os.umask(0)
    made = ForkServer()
    os.umask(before)
    yield made
    made.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, canaries: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / ".netrc").write_text(f"machine api.wandb.ai login user password {canaries['netrc']}\n")
    (folder / ".netrc").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, canaries: dict[str, str]) -> Path:
    made = tmp_path_factory.mktemp("work")
    (made / ".git").mkdir()
    (made / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (made / ".git" / "config").write_text(f'[remote "origin"]\n\turl = https://me:{canaries["remote"]}@host/x.git\n')
    (made / "mine.py").write_text(FAILS)
    return made


def families(pid: int, seen: dict[int, tuple[str, str]], ended: threading.Event) -> None:
    """Note the command line and the environment of whatever the command starts."""
    while not ended.is_set():
        try:
            for child in psutil.Process(pid).children(recursive=True):
                with child.oneshot():
                    command = " ".join(child.cmdline())
                if child.pid not in seen or seen[child.pid][0] != command:
                    seen[child.pid] = (command, Path(f"/proc/{child.pid}/environ").read_text(errors="replace"))
        except (psutil.Error, OSError):
            pass
        time.sleep(0.02)


COMMANDS = (
    "train --task mine.py run=a updates=4 tracker=wandb tracker.mode=offline profiler=trace profiler.skip=1 profiler.updates=1",
    "train --task mine.py run=a updates=8 tracker=wandb tracker.mode=offline resume_allow=[updates]",
    "inference run=a",
    "export a format=safetensors,program",
    "plan --task mine.py",
    "explain optimizer.lr --task mine.py",
    "status a",
    "train --task mine.py run=b updates=2 parallelism=ddp parallelism.world_size=2 tracker=none",
    "train --task mine.py -m optimizer.lr=0.1,0.01 updates=1 run=s",
)
ON_DEMAND = (7,)  # needs seconds, and shows the same as the first


@pytest.fixture(scope="module")
def told(
    open_handed: ForkServer, folder: Path, home: Path, canaries: dict[str, str]
) -> tuple[list[tuple[str, Ended]], dict[int, tuple[str, str]]]:
    """All commands were run: what each said, and what was started on the way."""
    env = {**{name: canaries[name] for name in NAMES}, "HOME": str(home), "NETRC": str(home / ".netrc")}
    found, seen = [], {}
    chosen = [words for number, words in enumerate(COMMANDS) if IS_LONG or number not in ON_DEMAND]
    failing = "train --task mine.py run=c updates=4 tracker=none"
    for words, more in [*((words, {}) for words in chosen), (failing, {"FAIL": "1"}), ("status c", {})]:
        on_cpu = ["device=cpu", "monitor=off"] if words.startswith(("train", "inference")) else []
        pid = open_handed.start([*words.split(), *on_cpu], folder, {**env, **more})
        ended = threading.Event()
        watch = threading.Thread(target=families, args=(pid, seen, ended))
        watch.start()
        said = open_handed.wait()
        ended.set()
        watch.join()
        assert said.code == (70 if more else 0), (words, said)
        found.append((words, said))
    return found, seen


def test_no_secret_is_in_what_a_run_leaves_and_says(
    told: tuple[list[tuple[str, Ended]], dict[int, tuple[str, str]]],
    folder: Path,
    home: Path,
    canaries: dict[str, str],
    tally: Tally,
) -> None:
    said, _ = told
    for words, ended in said:
        for name, canary in canaries.items():
            assert canary not in ended.out + ended.err, f"{name} in what {words} says"
            tally.tried += 1
    num_files = 0
    for path in (*folder.rglob("*"), *home.rglob("*")):
        if path.is_file() and ".git" not in path.parts and path.name != ".netrc":
            content, num_files = path.read_bytes(), num_files + 1
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            for name, canary in canaries.items():
                assert canary.encode() not in content, f"{name} in {path}"
                assert canary not in str(path)
                tally.tried += 1
    assert num_files > 50
    tally.notes["files"] = num_files
    failed = next(ended for words, ended in said if "run=c" in words)
    assert "401: (MY_PASSWORD) is not valid" in failed.err
    assert "(MY_PASSWORD)" in (folder / "outputs" / "c" / "error.json").read_text()


def test_what_is_started_gets_no_secret_that_it_does_not_need(
    told: tuple[list[tuple[str, Ended]], dict[int, tuple[str, str]]], canaries: dict[str, str]
) -> None:
    _, seen = told
    trackers = [environment for command, environment in seen.values() if "tracker_process.py" in command]
    assert trackers, "the tracker's process was not seen"
    for name, canary in canaries.items():
        assert not [command for command, _ in seen.values() if canary in command], name
        assert not [environment for environment in trackers if canary in environment], name


def test_nobody_else_can_read_what_a_run_leaves_whatever_the_umask(
    told: tuple[list[tuple[str, Ended]], dict[int, tuple[str, str]]], folder: Path, tally: Tally
) -> None:
    kinds = set()
    for path in [folder / "outputs", *(folder / "outputs").rglob("*")]:
        mode = path.lstat().st_mode
        if "wandb" in path.parts and stat.S_ISLNK(mode):
            continue  # to the log of its service, which is in the search for canaries
        wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
        assert stat.S_ISDIR(mode) or stat.S_ISREG(mode), f"{path} is neither a file nor a folder"
        assert mode & 0o777 == wanted, f"{path} is {mode & 0o777:o}, must be {wanted:o}"
        kinds.add(path.name)
        tally.tried += 1
    for name in (
        "trace.json.gz",
        "model.safetensors",
        "model.pt2",
        "metrics.jsonl",
        "wandb",
        "answer-0.npy",
    ):
        assert name in kinds, f"{name} was not among the files looked at"


def test_the_search_finds_a_canary(folder: Path, canaries: dict[str, str]) -> None:
    path = folder / "leak"
    path.write_text(canaries["HF_TOKEN"])
    try:
        assert any(canaries["HF_TOKEN"].encode() in one.read_bytes() for one in folder.rglob("*") if one.is_file())
    finally:
        path.unlink()


SECRET = "hunter2" + "x" * 20
TYPED = (
    f"+tracker.api_key={SECRET}", f"tracker.apiKey={SECRET}", f"--api-key={SECRET}", f"--token {SECRET}", f"token = {SECRET}",
    f"password= {SECRET}", f"++a.b.HF_TOKEN={SECRET}", f"tracker={{api_key:{SECRET}}}", f"tracker={{a:{{client_secret:{SECRET}}}}}",
    f"x={{password:{SECRET}", f"data.path=https://me:{SECRET}@host/x", f"tracker.project=hf_{SECRET}{SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"hydra.job.env_set.DB_PASSWORD={SECRET}", f"~secret={SECRET}", f"tracker@api_key={SECRET}", f"run=ghp_{SECRET}{SECRET}",
    f"{{api_key:{SECRET}}}=1", f"api_key={SECRET},other", f"password='{SECRET}'",
)  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        "train",
        "both",
        "plan",
        "explain",
        "inference",
        "status",
        "export",
        "import",
        "new",
        "completion",
        "train -m",
        "",
    ],
)
def test_a_secret_that_is_typed_is_refused_and_not_repeated(
    open_handed: ForkServer, tmp_path: Path, command: str, tally: Tally
) -> None:
    for typed in TYPED if command in ("train", "") else TYPED[:3]:
        ended = open_handed.run(f"{command} {typed}", tmp_path)
        assert ended.code == 78, (typed, ended)
        assert SECRET not in ended.out + ended.err, (typed, ended)
        if not typed.startswith("{"):
            assert "is a secret" in ended.err, (typed, ended)
        tally.tried += 1
    left = [path for path in tmp_path.rglob("*") if path.name not in (".out", ".err")]
    assert left == []


def test_a_secret_is_refused_in_the_words_to_type(open_handed: ForkServer, tmp_path: Path) -> None:
    assert open_handed.run(f"train +tracker.api_key={SECRET}", tmp_path).err == (
        "accel-run: tracker.api_key: is a secret, and those are neither typed nor kept in a configuration\n"
        "           take it out: wandb finds WANDB_API_KEY or ~/.netrc by itself, and a task reads its own environment;"
        " then change it, for the shell remembers it\n"
    )


def test_a_secret_in_the_settings_of_a_task_is_refused(open_handed: ForkServer, tmp_path: Path) -> None:
    source = (
        TASK.read_text()
        .replace('"optimizer.lr": 0.01', f'"task.api_key": "{SECRET}"')
        .replace("hidden: int = 8", "hidden: int = 8, api_key: str = ''")
    )
    (tmp_path / "mine.py").write_text(source)
    ended = open_handed.run("plan --task mine.py", tmp_path)
    assert ended.code == 78
    assert SECRET not in ended.out + ended.err
    assert "mine.py: task.api_key: is a secret" in ended.err


INNOCENT = (
    "optimizer.lr=0.1", "task.pad_token=0", "inference.stop_token=x", "inference.prompt='the password: is'", "task.num_tokens=3",
    "task.class_token=true", "lr_scales.class_token=0.1", "optimizer.lr_scales={class_token:0.1}", "task.loss_per_token=sum",
    "data.path=/data/opus-sk-cs-parallel-corpus-2024", "run=sk-learn-baseline-2026-01-a", "task.token=3",
    "tokenizer=bpe", "task.tokens=5", "run=secretary", "data.path=https://host:80/x", "api_key=null", "data.path=/a:b@c",
)  # fmt: skip


@pytest.mark.parametrize("word", INNOCENT)
def test_what_only_sounds_like_a_secret_is_let_through(word: str) -> None:
    refuse_secrets([word])


def test_no_key_of_ours_has_the_name_of_a_secret() -> None:
    from runner.base.configuration import AXES, GROUPS, function_of, options_of, task_source
    from runner.base.schema import read_functions, settings_keys
    from runner.base.settings import Settings

    keys = [*settings_keys(Settings), *GROUPS]
    for group in AXES:
        for option in options_of(group):
            signature = function_of(group, option)
            keys += list(signature.keys) if signature else []
    for task in options_of("task"):
        for function in read_functions(task_source(task, None)).values():
            keys += list(function.keys)
    assert not [key for key in keys if is_secret_name(key)]
    assert len(keys) > 100


def test_names_and_shapes_of_secrets() -> None:
    for name in (
        *NAMES,
        "apiKey",
        "DB_PASSWORD",
        "client_secret",
        "private-key",
        "accessToken",
        "ssh_passphrase",
        "a.b.token",
    ):
        assert is_secret_name(name), name
    for name in (
        "PATH",
        "PWD",
        "HOME",
        "max_tokens",
        "tokenizer",
        "keyboard",
        "monkey",
        "SHELL",
        "secretary",
        "pad_token",
    ):
        assert not is_secret_name(name), name
    assert has_secret_shape("-----BEGIN OPENSSH PRIVATE KEY-----")
    with pytest.raises(ConfigError):
        refuse_secrets(["--password", "x"])


def test_messages_neither_show_secrets_nor_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    shown = fit_to_show("\x1b[31mred\x07 correct horse \u202egnp\tok\n")
    assert shown == "\\x1b[31mred\\x07 (MY_PASSWORD) \\x202egnp\tok\n"
    assert without_secrets({"A_TOKEN": "x", "WANDB_API_KEY": "y", "PATH": "z"}, keep=("WANDB_",)) == {
        "WANDB_API_KEY": "y",
        "PATH": "z",
    }


def test_a_configuration_does_not_steer_the_terminal(open_handed: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(
        '# @package _global_\ndata: {path: "\\e[2Jgone"}\nhardware: {title: "\\e]0;evil\\a", devices: []}\n'
    )
    for words in ("plan", "explain data.path", "train data.train_samples=-1"):
        ended = open_handed.run(f"{words} --config-dir conf hardware=mine", tmp_path)
        assert "\x1b" not in ended.out + ended.err, words
        assert "\x07" not in ended.out + ended.err, words


def test_a_number_or_a_switch_in_a_file_is_no_secret() -> None:
    assert not list(secrets_in({"class_token": True, "lr_scales": {"token": 0.1, "auth": None}, "secret": [1, 2]}))
    assert list(secrets_in({"token": {"value": "x"}, "a": {"password": "x"}, "secrets": ["x"]})) == [
        "token",
        "a.password",
        "secrets",
    ]


@pytest.mark.parametrize(
    "name",
    ["PGPASSWORD", "SSHPASS", "DB_PASS", "DBPASSWORD", "GITHUB_PAT", "AZURE_STORAGE_CONNECTION_STRING", "DATABASE_URL",
     "DOCKER_AUTH_CONFIG", "AWS_BEARER_TOKEN_BEDROCK", "REDIS_PASSWORD", "MYSQL_PASS"],
)  # fmt: skip
def test_names_of_services_are_known_and_their_values_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret_name(name)
    monkeypatch.setenv(name, SECRET)
    assert SECRET not in fit_to_show(f"cannot log in with {SECRET}")
    assert name not in without_secrets(os.environ)


@pytest.mark.parametrize(
    "text",
    [f"postgres://me:{SECRET}@host/x", f"hf_{SECRET}{SECRET}", f"sk-ant-api03-{SECRET}-x", f"sk-proj-{SECRET}", f"sk-{SECRET}"],
)  # fmt: skip
def test_what_has_the_shape_of_a_secret_is_hidden_in_messages(text: str) -> None:
    assert has_secret_shape(text)
    shown = fit_to_show(f"cannot read {text}, sorry")
    assert SECRET not in shown
    assert shown.startswith("cannot read ")
    assert shown.endswith(", sorry")


@pytest.mark.parametrize(
    "where", ["def build(*, api_key: str = SECRET, ", "def predict(self, model, generator, *, hf_token: str = SECRET, "]
)
def test_a_secret_that_is_a_default_of_a_task_is_refused(open_handed: ForkServer, tmp_path: Path, where: str) -> None:
    lead = where.partition("*,")[0] + "*, "
    assert lead in TASK.read_text()
    (tmp_path / "mine.py").write_text(TASK.read_text().replace(lead, where.replace("SECRET", repr(SECRET))))
    for command in ("plan", "train"):
        ended = open_handed.run(f"{command} --task mine.py device=cpu updates=1 run=a", tmp_path)
        assert ended.code == 78, ended
        assert "is a secret" in ended.err
        assert SECRET not in ended.out + ended.err
    assert not (tmp_path / "outputs").exists()


def test_a_secret_that_comes_by_reference_is_refused(open_handed: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    text = "# @package _global_\ndata: {path: '${oc.env:DATA}'}\nhardware: {title: x, devices: []}\n"
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(text)
    words = f"plan --task {TASK} --config-dir conf hardware=mine"
    ended = open_handed.run(words, tmp_path, {"DATA": f"https://me:{SECRET}@host/x"})
    assert (ended.code, "data.path: is a secret" in ended.err) == (78, True), ended
    assert SECRET not in ended.out + ended.err
    assert open_handed.run(words, tmp_path, {"DATA": "/data"}).code == 0


def test_nothing_of_a_shape_is_passed_over_by_the_quick_look() -> None:
    parts = [
        "-----BEGIN ",
        "RSA ",
        "PRIVATE KEY",
        "://",
        "a:b@",
        "u",
        "hf_",
        *(f"gh{each}_" for each in "pousrx"),
        "AKIA",
    ]
    parts += [
        "github_pat_",
        "xoxb-",
        "glpat-",
        "wandb_v1_",
        "sk-",
        "proj-",
        "A" * 16,
        "a1" * 20,
        "9" * 31,
        "-",
        " ",
        ".",
    ]
    dice, num_found = random.Random(SEED), 0
    for _ in range(20_000):
        text = "".join(dice.choices(parts, k=dice.randint(1, 5)))
        found = secret._SHAPE.search(text) is not None
        assert has_secret_shape(text) == found, text
        num_found += found
    assert num_found > 300
