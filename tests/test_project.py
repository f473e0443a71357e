"""Project files agree with the code: version, licence, citation, changelog, image, hooks."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import runner
from runner.cli import main

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOLDER = "accel-run contributors"
START_OF_RELEASES = "<!-- towncrier release notes start -->"
FRAGMENTS = sorted(path for path in (ROOT / "changelog.d").iterdir() if path.name != ".gitignore")


# ---------------------------------------------------------------- scripts


@pytest.mark.parametrize("path", sorted(ROOT.glob("scripts/measure/*.py")), ids=lambda path: path.stem)
def test_scripts_import_only_existing_names(path: Path) -> None:
    """No test executes most of them, because measurements take minutes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("runner", "tests"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                is_submodule = hasattr(module, "__path__") and importlib.util.find_spec(submodule)
                assert hasattr(module, alias.name) or is_submodule, submodule


# ---------------------------------------------------------------- version and licence


def test_the_version_is_written_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel-run {runner.__version__}\n"
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "runner/version.py"
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", runner.__version__)


def test_all_licence_statements_agree() -> None:
    first, _, holder, *_ = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()
    assert first == "MIT License"
    assert re.fullmatch(rf"Copyright \(c\) \d{{4}} {re.escape(HOLDER)}", holder)
    assert PROJECT["project"]["license"] == "MIT"
    assert PROJECT["project"]["authors"] == [{"name": HOLDER}]


def test_the_citation_has_the_required_fields() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert set(citation) == {"cff-version", "message", "type", "title", "abstract", "authors", "license", "keywords"}
    assert citation["type"] == "software"
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["authors"] == PROJECT["project"]["authors"]
    assert all(isinstance(citation[key], str) for key in ("message", "title", "abstract"))


def test_packages_used_by_the_checks_are_pinned() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted, names = [*PROJECT["project"]["dependencies"], "accel-run[dev]"], set[str]()
    while wanted:
        name, *own = re.split(r"[\[\],<>=!~; ]+", wanted.pop())
        if name == "accel-run":
            wanted += [each for extra in own if extra for each in extras[extra]]
        else:
            names.add(plain(name))
    assert {"torch", "towncrier", "dipy"} <= names
    assert names - pinned == set(), "written down by pip freeze"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# ---------------------------------------------------------------- changelog


def test_changelog_fragments_have_a_known_kind() -> None:
    for path in FRAGMENTS:
        name = re.fullmatch(r"\+[a-z0-9-]+\.(\w+)\.md", path.name)
        assert name, f"{path.name}: must be named like +what.added.md"
        assert name[1] in PROJECT["tool"]["towncrier"]["fragment"], path.name
        text = path.read_text(encoding="utf-8")
        assert re.fullmatch(r"\S.*\.\n", text), f"{path.name}: must be one line that ends with a full stop"


def test_the_changelog_has_the_release_marker() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines.count(START_OF_RELEASES) == 1


def test_the_fragments_build_a_changelog() -> None:
    pytest.importorskip("towncrier")
    before = (ROOT / "CHANGELOG.md").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--date", "2026-01-01"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"## {runner.__version__} (2026-01-01)" in done.stdout
    for path in FRAGMENTS:
        assert path.read_text(encoding="utf-8").strip() in done.stdout
    assert (ROOT / "CHANGELOG.md").read_bytes() == before


# ---------------------------------------------------------------- hooks and editors


def test_pre_commit_hooks_match_the_check_script() -> None:
    script = (ROOT / "scripts" / "check").read_text(encoding="utf-8")
    called = re.findall(r'^\s*check "([\w ]+)" (.+)$', script, re.MULTILINE)
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["name"]: shlex.split(hook["entry"]) for hook in repository["hooks"]}
    assert repository["repo"] == "local"
    assert list(hooks) == [name for name, _ in called]
    for name, call in called:
        args = shlex.split(call.replace("$venv", ".venv"))
        assert hooks[name] in (args, ["bash", "-c", shlex.join(args).replace("'", "")]), name
    assert all(hook["pass_filenames"] is False for hook in repository["hooks"])


def test_editorconfig_has_the_line_length_of_the_formatter() -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text(encoding="utf-8"))
    assert parser["top"]["root"] == "true"
    assert parser["*"]["max_line_length"] == str(PROJECT["tool"]["ruff"]["line-length"])
    assert parser["*"]["indent_style"] == "space"


# ---------------------------------------------------------------- the image


def instructions(name: str = "Dockerfile") -> list[tuple[str, str]]:
    """Return (INSTRUCTION, arguments), with continued lines joined and without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def test_image_is_pinned_and_does_not_run_as_root() -> None:
    result = instructions()
    arguments = dict(rest.partition("=")[::2] for word, rest in result if word == "ARG")
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", arguments["BASE"])
    assert [rest for word, rest in result if word == "FROM"] == ["${BASE}"]
    users = [rest for word, rest in result if word == "USER"]
    assert re.fullmatch(r"[1-9]\d+", users[-1])
    last = [word for word, _ in result].index("USER")
    assert not {"RUN", "COPY", "ADD"} & {word for word, _ in result[last:]}
    assert ("ENTRYPOINT", '["accel-run"]') in result


def test_image_has_the_compilers_for_torch_compile() -> None:
    """Debian's g++ depends on gcc, which Triton's launchers need; Python's images have Python.h."""
    arguments = dict(rest.partition("=")[::2] for word, rest in instructions() if word == "ARG")
    assert "g++" in shlex.split(arguments["PACKAGES"].strip('"'))


def test_packages_of_the_image_are_pinned() -> None:
    installs = [
        part for word, rest in instructions() if word == "RUN" for part in rest.split("&&") if "pip install" in part
    ]
    assert installs
    for part in installs:
        args = shlex.split(part)
        assert args[args.index("--constraint") + 1] == "scripts/constraints.txt"
        assert "--no-cache-dir" in part
    arguments = dict(rest.partition("=")[::2] for word, rest in instructions() if word == "ARG")
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_image_contains_only_required_files() -> None:
    result = instructions()
    assert not [
        rest for word, rest in result if word in ("ARG", "ENV") and re.search(r"(?i)key|token|secret|passw", rest)
    ]
    assert not [rest for word, rest in result if word == "ADD"]
    ignored, *kept = [
        line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]
    assert ignored == "*", "everything that is not listed is excluded"
    allowed = [line[1:] for line in kept if line.startswith("!")]
    sources = {source for word, rest in result if word == "COPY" for source in rest.split()[:-1]}
    assert sources == set(allowed)
    assert all((ROOT / source).exists() for source in sources)
    assert not any(fnmatch(".env", pattern) or fnmatch(".git", pattern) for pattern in allowed)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_no_findings() -> None:
    done = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
