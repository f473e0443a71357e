"""Fake secrets must not appear in files, output and subprocesses of a run, and other users must not read its files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import os
import random
import re
import secrets
import stat
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from runner.base.errors import ConfigError
from runner.base.secret import (
    drop_secrets,
    find_secrets,
    has_secret_shape,
    is_secret,
    is_secret_name,
    redact,
    redact_message,
    sanitize,
)
from runner.base.secret_refusal import refuse_secrets
from runner.durable import files
from runner.durable.directory import RunDirectory
from tests.cpu_time import children_of
from tests.faults.canaries import NAMES, SHAPES, make_secret, make_values
from tests.faults.tallies import IS_LONG, SEED, Tally
from tests.forkserver import CompletedCommand, ForkServer

# ruff: noqa: E501 - exact texts are compared

TASK = Path(__file__).with_name("task_to_attack.py")
# A task that leaks all secrets: in the output of this process and of data workers, in warnings, and in an exception with
# the key in its message and in the source line of the traceback, like exceptions of service clients.
FAILS = """\
import json
import os
import sys
import warnings
from pathlib import Path

KNOWN = [os.environ.get(name, "") for name in json.loads(Path("names.json").read_text())]
KNOWN += json.loads(Path("shapes.json").read_text())


class Leaking:
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == 0:
            leak_all()
        return self.inner[index]


def leak_all():
    for each in KNOWN:
        print("read with", each)
        print("read with", each, file=sys.stderr)
    warnings.warn("\\n".join(KNOWN))
    assert os.environ["MY_PASSWORD"]
""" + TASK.read_text().replace(
    "        points, wanted = batch\n",
    "        points, wanted = batch\n        key = os.environ['MY_PASSWORD']\n"
    "        if os.environ.get('FAIL'):\n            leak_all()\n"
    "            raise ConnectionError(f'401: {key} is not valid at https://host/?token={key}\\\\n' + '\\\\n'.join(KNOWN))\n",
).replace("        return torch.utils.data.TensorDataset(", "        return Leaking(torch.utils.data.TensorDataset(").replace(
    "(points.sum(1) > 2).long())", "(points.sum(1) > 2).long()))"
)  # fmt: skip


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """The environment variables with secrets."""
    return make_values(random.Random(SEED))


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    """Secrets that only their format reveals, each with the parts that must not be visible."""
    dice = random.Random(SEED)
    return dict(make_secret(shape, dice) for shape in (*SHAPES, *SHAPES, *SHAPES))


@pytest.fixture(scope="module")
def canaries(variables: dict[str, str], texts: dict[str, list[str]]) -> dict[str, str]:
    """The texts to search for in all files and output."""
    result = {name: next(iter(CORE.findall(value))) for name, value in variables.items()}
    result |= {part: part for parts in texts.values() for part in parts}
    result |= {name: f"canary{secrets.token_hex(17)}" for name in ("netrc", "remote")}
    assert len({*NAMES, *SHAPES}) >= 200
    assert len(result) > len({*NAMES, *SHAPES})
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, canaries: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / ".netrc").write_text(f"machine api.wandb.ai login user password {canaries['netrc']}\n")
    (folder / ".netrc").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, canaries: dict[str, str], texts: dict[str, list[str]]) -> Path:
    work = tmp_path_factory.mktemp("work")
    (work / ".git").mkdir()
    (work / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (work / ".git" / "config").write_text(f'[remote "origin"]\n\turl = https://me:{canaries["remote"]}@host/x.git\n')
    (work / ".git" / "config").write_text(
        (work / ".git" / "config").read_text() + "".join(f'[remote "{each}"]\n\turl = {each}\n' for each in texts)
    )
    (work / "mine.py").write_text(FAILS)
    (work / "names.json").write_text(json.dumps(list(NAMES)))
    (work / "shapes.json").write_text(json.dumps(list(texts)))
    return work


def descendants_of(pid: int) -> Iterator[int]:
    for child in children_of(pid):
        yield child
        yield from descendants_of(child)


def record_processes(pid: int, seen: dict[int, tuple[str, str]], result: threading.Event) -> None:
    """Record the command line and the environment of every process that the command starts."""
    while not result.is_set():
        for child in descendants_of(pid):
            with suppress(OSError):  # the process has just ended
                process = Path(f"/proc/{child}")
                command = process.joinpath("cmdline").read_text(errors="replace").replace("\0", " ").strip()
                if child not in seen or seen[child][0] != command:
                    seen[child] = (command, process.joinpath("environ").read_text(errors="replace"))
        time.sleep(0.02)  # lint-tests: sleep: polling interval; no order depends on it


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
SLOW = (1, 7, 8)  # commands of which, by default, a seed selects only one


@pytest.fixture(scope="module")
def outputs_and_processes(
    server: ForkServer, folder: Path, home: Path, variables: dict[str, str]
) -> tuple[list[tuple[str, CompletedCommand]], dict[int, tuple[str, str]]]:
    """Run all commands with umask 0; return their outputs and the processes that they started."""
    env = {**variables, "HOME": str(home), "NETRC": str(home / ".netrc")}
    actual, seen = [], {}
    left_out = () if IS_LONG else random.Random(f"{SEED} commands").sample(SLOW, len(SLOW) - 1)
    chosen = [args for number, args in enumerate(COMMANDS) if number not in left_out]
    failing = "train --task mine.py run=c updates=4 tracker=none dataloader.num_workers=1"
    for args, more in [*((args, {}) for args in chosen), (failing, {"FAIL": "1"}), ("status c", {})]:
        on_cpu = ["device=cpu", "monitor=off"] if args.startswith(("train", "inference")) else []
        pid = server.start([*args.split(), *on_cpu], folder, {**env, **more}, "import os; os.umask(0)")
        result = threading.Event()
        watch = threading.Thread(target=record_processes, args=(pid, seen, result))
        watch.start()
        messages = server.wait()
        result.set()
        watch.join()
        assert messages.code == (70 if more else 0), (args, messages)
        actual.append((args, messages))
    return actual, seen


@pytest.mark.slow
def test_run_files_and_output_contain_no_secrets(
    outputs_and_processes: tuple[list[tuple[str, CompletedCommand]], dict[int, tuple[str, str]]],
    folder: Path,
    home: Path,
    canaries: dict[str, str],
    tally: Tally,
) -> None:
    messages, _ = outputs_and_processes
    for args, result in messages:
        for name, canary in canaries.items():
            assert canary not in result.out + result.err, f"{name} in the output of {args}"
            tally.tried += 1
    num_files = 0
    for path in (*folder.rglob("*"), *home.rglob("*")):
        if path.is_file() and ".git" not in path.parts and path.name not in NOT_SEARCHED:
            content, num_files = path.read_bytes(), num_files + 1
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            for name, canary in canaries.items():
                assert canary.encode() not in content, f"{name} in {path}"
                assert canary not in str(path)
                tally.tried += 1
    assert num_files > 50
    tally.notes["files"] = num_files
    failed = next(result for args, result in messages if "run=c" in args)
    assert "401: (MY_PASSWORD)" in failed.err
    assert "(MY_PASSWORD)" in (folder / "outputs" / "c" / "error.json").read_text()


@pytest.mark.slow
def test_subprocesses_get_only_needed_secrets(
    outputs_and_processes: tuple[list[tuple[str, CompletedCommand]], dict[int, tuple[str, str]]],
    canaries: dict[str, str],
) -> None:
    _, seen = outputs_and_processes
    trackers = [environment for command, environment in seen.values() if "tracker_process.py" in command]
    assert trackers, "the tracker's process was not seen"
    for name, canary in canaries.items():
        assert not [command for command, _ in seen.values() if canary in command], name
        assert not [environment for environment in trackers if canary in environment], name


@pytest.mark.slow
def test_run_files_are_private_with_any_umask(
    outputs_and_processes: tuple[list[tuple[str, CompletedCommand]], dict[int, tuple[str, str]]],
    folder: Path,
    tally: Tally,
) -> None:
    kinds = set()
    for path in [folder / "outputs", *(folder / "outputs").rglob("*")]:
        mode = path.lstat().st_mode
        if "wandb" in path.parts and stat.S_ISLNK(mode):
            continue  # links to the log of wandb's service, which is searched for secrets
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
        assert name in kinds, f"{name} is not among the checked files"


def test_the_search_detects_a_leaked_canary(folder: Path, canaries: dict[str, str]) -> None:
    path = folder / "leak"
    path.write_text(canaries["HF_TOKEN"])
    try:
        assert any(canaries["HF_TOKEN"].encode() in one.read_bytes() for one in folder.rglob("*") if one.is_file())
    finally:
        path.unlink()


NOT_SEARCHED = (".netrc", "names.json", "shapes.json")  # the sources of the secrets
CORE = re.compile("canary[A-Za-z0-9]+")

SECRET = "hunter2" + "x" * 20
TYPED = (
    f"+tracker.api_key={SECRET}", f"tracker.apiKey={SECRET}", f"--api-key={SECRET}", f"--token {SECRET}", f"token = {SECRET}",
    f"password= {SECRET}", f"++a.b.HF_TOKEN={SECRET}", f"tracker={{api_key:{SECRET}}}", f"tracker={{a:{{client_secret:{SECRET}}}}}",
    f"x={{password:{SECRET}", f"data.path=https://me:{SECRET}@host/x", f"tracker.project=hf_{SECRET}{SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f"hydra.job.env_set.DB_PASSWORD={SECRET}", f"~secret={SECRET}", f"tracker@api_key={SECRET}", f"run=ghp_{SECRET}{SECRET}",
    f"{{api_key:{SECRET}}}=1", f"api_key={SECRET},other", f"password='{SECRET}'",
)  # fmt: skip


@pytest.mark.slow_beyond(2)
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
def test_a_secret_on_the_command_line_is_rejected_and_not_repeated(
    server: ForkServer, tmp_path: Path, command: str, tally: Tally
) -> None:
    for typed in TYPED if command in ("train", "") else TYPED[:3]:
        result = server.run(f"{command} {typed}", tmp_path)
        assert result.code == 78, (typed, result)
        assert SECRET not in result.out + result.err, (typed, result)
        if not typed.startswith("{"):
            assert "like a secret" in result.err, (typed, result)
        tally.tried += 1
    left = [path for path in tmp_path.rglob("*") if path.name not in (".out", ".err")]
    assert left == []


def test_the_error_for_a_rejected_secret_has_a_fix(
    server: ForkServer, tmp_path: Path, screen: Callable[..., None]
) -> None:
    result = server.run(f"train +tracker.api_key={SECRET}", tmp_path)
    assert result.code == 78
    screen(result.err)


def test_secrets_in_task_settings_are_rejected(server: ForkServer, tmp_path: Path) -> None:
    source = (
        TASK.read_text()
        .replace('"optimizer.lr": 0.01', f'"task.api_key": "{SECRET}"')
        .replace("hidden: int = 8", "hidden: int = 8, api_key: str = ''")
    )
    (tmp_path / "mine.py").write_text(source)
    result = server.run("plan --task mine.py", tmp_path)
    assert result.code == 78
    assert SECRET not in result.out + result.err
    assert "task.api_key" in result.err


@pytest.mark.slow_beyond(2)
@pytest.mark.sampled(12)
@pytest.mark.parametrize("value", ["x", "hunter2", "3f9a8c", "0123456789abcdef0123456789abcdef01234567"])
@pytest.mark.parametrize(
    "args",
    ["train task.pwd=X", "train task.key=X", "train key=X", "train +dbpwd=X", "train --pwd X", "train --key=X", "train pin = X",
     "plan login= X", "plan mykey: X", "plan task={pwd:X}", "plan phase.train.pwd=X", "train -m task.pwd=X,1", "report pwd=X",
     "monitor key=X", "status pwd=X", "runs pwd=X", "doctor pwd=X", "tune pwd=X", "search seed=1,2 pwd=X"],
)  # fmt: skip
def test_possible_secrets_in_unknown_keys_are_not_repeated(
    args: str, value: str, server: ForkServer, tmp_path: Path
) -> None:
    result = server.run(args.replace("X", value), tmp_path)
    assert result.code == 78, result
    assert not re.search(rf"(?<!\w){value}(?!\w)", result.out + result.err), result


def test_a_random_value_of_an_unknown_key_is_not_repeated(server: ForkServer, tmp_path: Path) -> None:
    value = "0123456789abcdef0123456789abcdef01234567"
    for key in ("task.seed_of_all", "nothing", "optimizer.foo"):
        result = server.run(f"plan {key}={value}", tmp_path)
        assert result.code == 78
        assert key in result.err
        assert value not in result.err


def test_the_error_for_an_unknown_task_key_lists_known_keys(server: ForkServer, tmp_path: Path) -> None:
    for key in ("task.pwd", "task.hiden"):
        result = server.run(f"plan --task {TASK} {key}=x", tmp_path)
        assert result.code == 78
        assert "task.hidden" in result.err
        assert "environment" in result.err or key == "task.hiden"


HARMLESS = (
    "optimizer.lr=0.1", "task.pad_token=0", "inference.stop_token=x", "inference.prompt='the password: is'", "task.num_tokens=3",
    "task.class_token=true", "lr_scales.class_token=0.1", "optimizer.lr_scales={class_token:0.1}", "task.loss_per_token=sum",
    "data.path=/data/opus-sk-cs-parallel-corpus-2024", "run=sk-learn-baseline-2026-01-a", "task.token=3",
    "tokenizer=bpe", "task.tokens=5", "run=secretary", "data.path=https://host:80/x", "api_key=null", "data.path=/a:b@c",
    "dataloader.pin_memory=true", "task.pin=true", "task.pin=4096", "task.session=morning2evening7", "task.session_id=17",
    "task.sort_key=length", "task.key=value", "task.pwd=data", "task.hook=forward", "task.pem=none", "task.otp=27",
    "task.db_url=sqlite:///data/samples.db", "task.redis_url=redis://localhost:6379/0", "task.pat=*.npy",
    "task.commit=9fceb02d0ae598e95dc970b74767f19372d61af8", "data.path=~/data/9fceb02d0ae598e95dc970b74767f193",
    "task.name=NTU-RGBD.2019.skeletons", "task.name=SK-learn", "run=key-frames-2026", "data.path=/data/OT.2024.release",
    "task.keyboard=qwerty", "task.monkey=capuchin2019", "task.step_key=epoch", "run=doo_v1_baseline", "task.at=12:AA",
)  # fmt: skip


@pytest.mark.parametrize("word", HARMLESS)
def test_harmless_names_similar_to_secrets_are_accepted(word: str) -> None:
    refuse_secrets([word])


@pytest.mark.parametrize(
    "name",
    ["pwd", "pwd1", "otp", "pin", "session_id", "sshkey", "ghtoken", "conn_str", "db_url", "redis_url", "slack_hook",
     "sas", "pem", "openai_key", "pat", "ssh_key", "master_key", "license_key"],
)  # fmt: skip
def test_random_values_of_possible_secret_keys_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        refuse_secrets([f"task.{name}=a1b2c3d4e5f6g7h8i9"])


@pytest.mark.parametrize("name", ["ssh_key", "master_key", "license_key", "openai_key", "conn_str", "ghtoken"])
def test_any_value_of_a_secret_key_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError):
        refuse_secrets([f"task.{name}=wonderful"])


def test_the_variable_pwd_is_not_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/srv/run2data3sets4")
    assert redact("/srv/run2data3sets4") == "/srv/run2data3sets4"
    assert "PWD" in drop_secrets(os.environ)


def test_no_setting_has_the_name_of_a_secret() -> None:
    from runner.config.options import AXES, GROUPS, find_signature, list_options, task_source
    from runner.config.schema import read_functions, settings_keys
    from runner.config.settings import Settings

    keys = [*settings_keys(Settings), *GROUPS]
    for group in AXES:
        for option in list_options(group):
            signature = find_signature(group, option)
            keys += list(signature.keys) if signature else []
    for task in list_options("task"):
        for function in read_functions(task_source(task, None)).values():
            keys += list(function.keys)
    assert not [key for key in keys if is_secret_name(key)]
    assert len(keys) > 100


def test_secrets_are_recognized_by_name_and_shape() -> None:
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
        assert is_secret(name, "a1" * 8), name
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
    assert has_secret_shape(SHAPES[0].partition("{")[0])  # the header of a private key
    with pytest.raises(ConfigError):
        refuse_secrets(["--password", "x"])


def test_messages_neither_show_secrets_nor_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    shown = sanitize("\x1b[31mred\x07 correct horse \u202egnp\tok\n")
    wanted = r"\x1b[31mred\x07 (MY_PASSWORD) \x202egnp" + "\tok\n"
    assert shown == wanted
    assert drop_secrets({"A_TOKEN": "x", "WANDB_API_KEY": "y", "PATH": "z"}, keep=("WANDB_",)) == {
        "WANDB_API_KEY": "y",
        "PATH": "z",
    }


@pytest.mark.slow
def test_a_configuration_does_not_control_the_terminal(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(
        '# @package _global_\ndata: {path: "\\e[2Jgone"}\nhardware: {title: "\\e]0;evil\\a", devices: []}\n'
    )
    for args in ("plan", "explain data.path", "train data.train_samples=-1"):
        result = server.run(f"{args} --config-dir conf hardware=mine", tmp_path)
        assert "\x1b" not in result.out + result.err, args
        assert "\x07" not in result.out + result.err, args


def test_numbers_and_booleans_in_files_are_not_secrets() -> None:
    assert not list(find_secrets({"class_token": True, "lr_scales": {"token": 0.1, "auth": None}, "secret": [1, 2]}))
    assert list(find_secrets({"token": {"value": "x"}, "a": {"password": "x"}, "secrets": ["x"]})) == [
        "token",
        "a.password",
        "secrets",
    ]


@pytest.mark.parametrize(
    "name",
    ["PGPASSWORD", "SSHPASS", "DB_PASS", "DBPASSWORD", "GITHUB_PAT", "AZURE_STORAGE_CONNECTION_STRING", "DATABASE_URL",
     "DOCKER_AUTH_CONFIG", "AWS_BEARER_TOKEN_BEDROCK", "REDIS_PASSWORD", "MYSQL_PASS"],
)  # fmt: skip
def test_values_of_service_variables_are_redacted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_secret_name(name)
    monkeypatch.setenv(name, SECRET)
    assert SECRET not in sanitize(f"no login with {SECRET}")
    assert name not in drop_secrets(os.environ)


@pytest.mark.parametrize(
    "text",
    [f"postgres://me:{SECRET}@host/x", f"hf_{SECRET}{SECRET}", f"sk-ant-api03-{SECRET}-x", f"sk-proj-{SECRET}", f"sk-{SECRET}"],
)  # fmt: skip
def test_values_shaped_like_secrets_are_redacted(text: str) -> None:
    assert has_secret_shape(text)
    shown = sanitize(f"cannot read {text}, sorry")
    assert SECRET not in shown
    assert shown.startswith("cannot read ")
    assert shown.endswith(", sorry")


@pytest.mark.parametrize(
    "where", ["def build(*, api_key: str = SECRET, ", "def predict(self, model, generator, *, hf_token: str = SECRET, "]
)
def test_secrets_in_task_defaults_are_rejected(server: ForkServer, tmp_path: Path, where: str) -> None:
    lead = where.partition("*,")[0] + "*, "
    assert lead in TASK.read_text()
    (tmp_path / "mine.py").write_text(TASK.read_text().replace(lead, where.replace("SECRET", repr(SECRET))))
    for command in ("plan", "train"):
        result = server.run(f"{command} --task mine.py device=cpu updates=1 run=a", tmp_path)
        assert result.code == 78, result
        assert "like a secret" in result.err
        assert SECRET not in result.out + result.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("method", ["evaluate", "summarize"])
def test_secrets_in_metric_names_are_not_written_to_files(method: str, server: ForkServer, tmp_path: Path) -> None:
    answer = "(1.0, 1)" if method == "evaluate" else "1.0"
    arguments = "self, model, batch" if method == "evaluate" else "self, metrics"
    body = f"    def {method}({arguments}):\n        return {{'m_' + os.environ['MY_PASSWORD']: {answer}}}\n\n"
    source = TASK.read_text()
    assert source.count("    def loss(") == 1
    (tmp_path / "mine.py").write_text("import os\n" + source.replace("    def loss(", f"{body}    def loss("))
    result = server.run("train --task mine.py device=cpu updates=1 run=a", tmp_path, {"MY_PASSWORD": SECRET})
    assert result.code == 70, result
    assert "m_(MY_PASSWORD)" in result.err
    assert SECRET not in result.out + result.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_secret_in_a_referenced_environment_variable_is_rejected(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    text = "# @package _global_\ndata: {path: '${oc.env:DATA}'}\nhardware: {title: x, devices: []}\n"
    (tmp_path / "conf" / "hardware" / "mine.yaml").write_text(text)
    args = f"plan --task {TASK} --config-dir conf hardware=mine"
    result = server.run(args, tmp_path, {"DATA": f"https://me:{SECRET}@host/x"})
    assert (result.code, "data.path: " in result.err) == (78, True), result
    assert SECRET not in result.out + result.err
    assert server.run(args, tmp_path, {"DATA": "/data"}).code == 0


def test_a_text_is_recognized_as_secret_exactly_if_it_is_redacted() -> None:
    parts = ["-----BEGIN ", "RSA ", "PRIVATE KEY", "://", "a:b@", "u", "-", " ", ".", "A" * 16, "a1" * 20, "9" * 31]
    parts += [re.split("{", shape)[0] for shape in SHAPES]
    dice, num_found = random.Random(SEED), 0
    for _ in range(20_000):
        text = "".join(dice.choices(parts, k=dice.randint(1, 5)))
        result = redact(text) != text
        assert has_secret_shape(text) == result, text
        num_found += result
    assert num_found > 300


def test_each_shape_is_rejected_as_input_and_redacted_in_output(texts: dict[str, list[str]]) -> None:
    for text, parts in texts.items():
        assert parts, f"{text} has no part to search for"
        shown = sanitize(f"no login with {text}, sorry")
        assert not [part for part in parts if part in shown], shown
        assert shown.startswith("no login with "), shown
        if redact(text) != text:  # otherwise, only the name of its variable identifies it
            with pytest.raises(ConfigError) as refused:
                refuse_secrets([f"task.note={text}"])
            assert not [part for part in parts if part in str(refused.value)]


def test_values_of_secret_names_are_rejected_and_redacted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in make_values(random.Random(SEED + 1)).items():
        core = CORE.findall(value)[0]
        for word in (f"task.{name}={value}", f"task.{name.lower()}={core}", f"task={{{name}:{core}}}"):
            with pytest.raises(ConfigError) as refused:
                refuse_secrets([word])
            assert core not in str(refused.value)
        assert name not in drop_secrets({name: value})
        monkeypatch.setenv(name, value)
        ways = (value, json.dumps(value), repr(value), html.escape(value), urllib.parse.quote(value), f"x{value}y")
        for way in ways:
            assert core not in redact(f"cannot read {way}"), way
        with pytest.raises(ConfigError) as refused:  # like `task.note=$NAME`
            refuse_secrets([f"task.note={value}"])
        assert core not in str(refused.value)


def test_a_password_removed_from_the_environment_is_still_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_DSN", f"postgres://me:{SECRET}9@host/db")
    assert SECRET not in sanitize(f"password {SECRET}9 is wrong")
    monkeypatch.delenv("SOME_DSN")
    assert SECRET not in sanitize(f"password {SECRET}9 is wrong")


@pytest.mark.parametrize(
    "before",
    ["\x1b[31m", "\x1b[0m", "\x1b[m", json.dumps("\x1b[1;32m"), repr("\x1b[31m"), "%3D", "\\u003d", "\\x3d", "\\n", "token="],
)  # fmt: skip
def test_a_shape_is_recognized_after_color_codes_and_escapes(before: str) -> None:
    for lead in ("hf_", "ghp_", "AKIA", "sk_live_"):
        secret = f"{lead}{'A1B2C3D4' * 5}"[: 20 if lead == "AKIA" else 40]
        for shown in (redact(f"with {before}{secret} "), sanitize(f"with {before}{secret}\x1b[0m")):
            assert secret not in shown


@pytest.mark.parametrize(
    "text",
    ["\x1b[36mpassword\x1b[0m=\x1b[35mX\x1b[0m", "password:\x1b[32m 'X'", "{'token': b'X'}", '{\\"pw\\": \\"X\\"}',
     "postgres://me:p@X@host/db", "https://me:a@b@X@host", "psql --db-password X", "['psql', '--password', 'X']"],
)  # fmt: skip
def test_a_value_is_redacted_in_each_notation(text: str) -> None:
    assert "hunter2abc99" not in sanitize(text.replace("X", "hunter2abc99"))


def test_a_password_with_an_at_sign_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE", f"postgres://me:{SECRET}@{SECRET}2@host/db")
    assert SECRET not in sanitize(f"wrong password: {SECRET}@{SECRET}2")
    monkeypatch.setenv("STORE", "http://host:8080/x and you@host")
    assert sanitize("8080/x and you") == "8080/x and you"


@pytest.mark.parametrize("word", ["training", "Checkpoint", "PARAMETERS", str(Path(__file__).parent)])
def test_a_dictionary_word_is_redacted_only_after_a_name(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASS", word)
    text = f'{word} 0.5; \'{word}\' {word}/x {{"kind": "{word}"}}'
    assert redact(text) == text
    assert redact_message(text) == text
    refuse_secrets([f"task.note={word}"])
    if not word.startswith("/"):
        assert word not in sanitize(f"password={word}, password: '{word}'")
    monkeypatch.setenv("MY_PASS", "xKqPzwLmRt")
    assert "xKqPzwLmRt" not in sanitize("401: \x1b[31mxKqPzwLmRt is wrong")


@pytest.mark.parametrize("word", ["wordnet50", "adamq8bit", "Closefar100", "imagine1k", "gpx2-medium", "vix_16_base"])
def test_a_short_alphanumeric_password_is_accepted_as_input_and_redacted(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A password may equal the name of a model, which must stay in files that programs read back.

    No file of the repository contains these words, because this process remembers them as secrets.
    """
    monkeypatch.setenv("DB_PASSWORD", word)
    refuse_secrets([f"task.model={word}", f"data.path=/data/{word}", word])
    assert redact(f"task.model={word}") == f"task.model={word}"
    assert redact_message(f"model {word}") == "model (DB_PASSWORD)"
    with pytest.raises(ConfigError):
        refuse_secrets([f"task.password={word}"])


@pytest.mark.parametrize("value", ["aB3dE5fGh7", "a1b2c3d4", "Winter2024", "tr0ub4dor&3", "hunter2hunter2", "x9-y8-z7"])
def test_random_looking_passwords_are_rejected_as_input(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", value)
    with pytest.raises(ConfigError):
        refuse_secrets([f"task.model={value}"])
    assert value not in redact(f"task.model={value}")


@pytest.mark.slow
def test_options_and_choices_equal_to_a_password_can_be_used(server: ForkServer, tmp_path: Path) -> None:
    """Such a run can also be resumed. A password that is not the value of an option or a choice is still rejected."""
    option, choice = "rtx3050ti_4gb", "vit_base_patch16_224"
    source = (
        TASK.read_text()
        .replace("hidden: int = 8", f"model: Literal['small', '{choice}'] = 'small', hidden: int = 8")
        .replace("import torch\n", "from typing import Literal\nimport torch\n", 1)
    )
    (tmp_path / "mine.py").write_text(source)
    env = {"DB_PASSWORD": choice, "MY_PASS": option}
    train = f"train --task mine.py run=a updates=2 device=cpu monitor=off +hardware={option} precision=fp32"
    for args in (
        f"{train} task.model={choice}",
        "resume a updates=3 resume_allow=[updates]",
        "inference a",
        "status a",
    ):
        result = server.run(args, tmp_path, env)
        assert result.code == 0, result.err
        assert choice not in result.out + result.err
    record = json.loads((tmp_path / "outputs" / "a" / "run.json").read_text())
    assert f"task.model={choice}" in record["overrides"]
    other = {"DB_PASSWORD": "vit_large_patch16_224"}
    args = f"plan --task mine.py task.model={choice}"
    assert server.run(args, tmp_path, other).code == 0
    result = server.run("plan --task mine.py data.path=vit_large_patch16_224", tmp_path, other)
    assert result.code == 78
    assert "like a secret" in result.err


def test_a_secret_added_to_the_environment_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        monkeypatch.setenv("SOME_TOKEN", f"{SECRET}-{number}x")
        assert SECRET not in sanitize(f"with {SECRET}-{number}x")


def test_an_unchanged_environment_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    redact("x" * 20)
    names: list[bytes] = []
    decode = os.environ.decodevalue
    monkeypatch.setattr(os.environ, "decodevalue", lambda value: (names.append(value), decode(value))[1])
    redact('{"update": 1, "train/loss": 0.12345678901234567}')
    redact_message("epoch 1 of 3, loss 0.1")
    assert not names


@pytest.mark.parametrize(
    ("name", "value"),
    [("CACHE_KEY", "py311-linux"), ("EXP_KEY", "exp-run42"), ("COMET_EXPERIMENT_KEY", "f0e1d2c3b4a59687")],
)
def test_run_names_can_contain_values_of_harmless_variables(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    refuse_secrets([f"run={value}-lr3"])
    assert redact_message(f"outputs/{value}-lr3") == f"outputs/{value}-lr3"


def test_random_looking_harmless_values_are_not_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, digest, uuid = "0f" * 20, hashlib.sha256(b"x").hexdigest(), "550e8400-e29b-41d4-a716-446655440000"
    monkeypatch.setenv("DB_PASSWORD", "postgres")
    monkeypatch.setenv("KEY_COOKIE", str(Path(__file__)))
    for text in (
        json.dumps({"git": {"branch": "refs/heads/main", "commit": commit}}),
        json.dumps({"model.safetensors": {"sha256": digest, "bytes": 12345678}}),
        f"run gpt-20260131-142530-ab12cd {uuid} update-0000000012",
        f"GPU-{uuid} MIG-{uuid} {uuid.upper()} commit {commit[:12]}",
        "path-1/pa-2/as-is/ak-47 /data/fc-x/token 3 of 5, sl.mean() re_2024_final patterns.0a secret_santa_dataset",
        f"/mnt/pat/{digest}/v1.0-rc1 nk-{commit[:10]} python --user install, rate 12.5 Token 7",
        "tokens/s=12345678 max_tokens=100000000 pad_token=50256 per_token: 0.12345678",
        "https://docs.pytorch.org/tutorials/recipes/regional_compilation.html ssh://git@host/x",
        "outputs/postgres-1/plots", str(Path(__file__)), "a key: left_camera_image_0", "sort_key=left_camera_image_0",
        "task.image_key=jpg", "inference.stop_token=x", "Basic implementation, bearer of news",
    ):  # fmt: skip
        assert redact(text) == text
        refuse_secrets([text])
        if "postgres" not in text and str(Path(__file__)) != text:
            assert sanitize(text) == text


@pytest.mark.parametrize("show", [redact, redact_message])
def test_numbers_hashes_and_data_are_not_secrets(show: Callable[[str], str]) -> None:
    dice = random.Random(SEED)
    names = ("tokens", "auth", "key_norm", "first_token", "sig", "pass_s", "token", "password", "string_len", "hook_ms")
    for _ in range(300):
        row = json.dumps({f"train/{name}": dice.gauss(0, 1) * 10 ** dice.randint(-30, 30) for name in names})
        data = base64.b64encode(dice.randbytes(300)).decode()
        for text in (row, data, dice.randbytes(32).hex(), f"/data/tokens/{dice.randrange(10**8)}_key.parquet"):
            assert show(text) == text
    numbers = "token: nan, auth=-inf password=0.00012345678901234567"
    assert show(numbers) == numbers


@pytest.mark.slow
def test_shipped_settings_and_tasks_are_not_mistaken_for_secrets() -> None:
    from runner.config.configuration import compose
    from runner.config.options import list_options
    from runner.config.request import Request

    root = Path(__file__).parent.parent.parent
    for task in list_options("task"):
        flat = compose(Request((f"task={task}",))).flat()
        assert list(find_secrets(flat)) == []
        refuse_secrets([f"{key}={value}" for key, value in flat.items()])
        text = json.dumps(flat)
        assert sanitize(text) == text
    for file in (*(root / "conf").rglob("*.yaml"), *(root / "tasks").rglob("*.py")):
        text = file.read_text()
        assert redact_message(text) == text, file


def test_secrets_are_redacted_in_text_files_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, list[str]]
) -> None:
    monkeypatch.setenv("MY_PASS", f"{SECRET}1")
    messages = "\n".join((f"{SECRET}1", *(text for text in texts if has_secret_shape(text))))
    with RunDirectory.create_or_open(tmp_path, "a") as directory:
        for name in ("memory.txt", "stacks.txt", "run.json", "report.html", "overrides.yaml"):
            kept = directory.write(name, messages).read_text()
            assert SECRET not in kept
            assert not has_secret_shape(kept)
        rows = files.AppendLog(directory.metrics)
        rows.write(json.dumps({"update": 1, messages: 2.0}))
        rows.sync()
        rows.close()
        kept = directory.metrics.read_text()
        assert SECRET not in kept
        assert json.loads(kept)["update"] == 1


def test_compiled_code_is_stored_in_the_user_cache(server: ForkServer, tmp_path: Path) -> None:
    source = TASK.read_text().replace("def build(", "import os\n\n\ndef build(", 1)
    shown = 'print("kept in", os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"])'
    (tmp_path / "mine.py").write_text(
        source.replace("    return Target(hidden)", f"    {shown}\n    return Target(hidden)")
    )
    (tmp_path / "cache").mkdir(mode=0o700)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": ""}
    result = server.run("train --task mine.py updates=1 device=cpu monitor=off run=a", tmp_path, environment)
    assert result.code == 0, result
    places = [line.split()[2:] for line in result.out.splitlines() if line.startswith("kept in")]
    assert [len(line) for line in places] == [2]
    assert all(Path(place).is_relative_to(tmp_path / "cache") for line in places for place in line)
