"""`plan` shows how a model and its updates would be divided among ranks, even on hardware that is not present."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands_here import run_here
from tests.forkserver import ForkServer
from tests.suggestions import suggested

PAIR = "plan +hardware=pair_11gb_8gb global_batch_size=32"


@pytest.mark.slow
def test_unequal_gpus_share_updates_by_memory(server: ForkServer, tmp_path: Path) -> None:
    result = server.run(f"{PAIR} parallelism=ddp parallelism.shares=memory task.size=tiny", tmp_path)
    assert result.code == 0, result.err
    assert "19 (rank 0: 1 x 19) + 13 (rank 1: 1 x 13)" in result.out
    assert re.search(r"19 \(59%\) +1 x 19 +11\.0 GiB +cuda:0: .* 2080 Ti", result.out)


@pytest.mark.slow
def test_the_plan_lists_the_layers_of_a_pipeline(server: ForkServer, tmp_path: Path) -> None:
    result = server.run(f"{PAIR} parallelism=pipeline task.size=tiny", tmp_path)
    assert result.code == 0, result.err
    assert re.search(r" = 8 .* of 4, .* 2 stages", result.out)
    rows = [line for line in result.out.splitlines() if "rank " in line and "MiB" in line]
    names = ["embedding+positions", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm+embedding"]
    assert [row.split()[0] for row in rows] == names, "each layer must be listed once, in order"


@pytest.mark.slow
def test_auto_reports_needed_and_available_memory(tmp_path: Path) -> None:
    result = run_here(f"{PAIR} parallelism=auto task.size=tiny", tmp_path)
    assert result.code == 0, result.err
    assert re.search(r"^parallelism +ddp +auto: ", result.out, re.M)
    assert "3.18 MiB" in result.out
    one = run_here("plan +hardware=t4 parallelism=auto task.size=tiny", tmp_path)
    assert re.search(r"^parallelism +single .*\(Tesla T4\)", one.out, re.M)
    assert re.search(r" 15 GiB\n +fits\n", one.out), one.out
    assert re.search(r"[\d,]+ on rank 0", one.out)
    assert re.search(r"^update time +[\d.]+ ms", one.out, re.M)
    assert suggested(one.out.splitlines()[-1]) == ["hardware=t4", "parallelism=auto", "task.size=tiny"]


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_reported_with_remedies(tmp_path: Path) -> None:
    """The libraries leave 100 MiB for tensors, and a micro-batch of 64 samples needs more."""
    profile = tmp_path / "conf" / "hardware" / "small.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(
        "# @package _global_\nhardware:\n  title: a small GPU\n"
        "  devices: [{name: Small, memory_gib: 0.66, capability: [7, 5], fp32_tflops: 1, memory_bandwidth_gb_s: 100}]\n"
    )
    args = "plan --config-dir conf hardware=small task.size=tiny precision=fp32 global_batch_size=64"
    result = run_here(f"{args} micro_batch_size=64", tmp_path)
    assert result.code == 0, result.err
    assert "DOES NOT FIT" in result.out
    rows = re.findall(r"^ *([\d.]+ [GM]iB)  +x ([\d.]+)  (\S+)$", result.out, re.M)
    assert [float(factor) for _, factor, _ in rows] == sorted(float(factor) for _, factor, _ in rows)
    actual = {word.partition("=")[0]: word for _, _, word in rows}
    assert {"micro_batch_size", "memory"} <= actual.keys(), result.out
    again = run_here(f"{args} {actual['micro_batch_size']}", tmp_path)
    assert "DOES NOT FIT" not in again.out, "the suggested micro-batch size must fit"
    assert again.code == 0


def test_errors_of_a_task_are_attributed_to_the_task(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import torch\nfrom torch import nn\nfrom runner import Task\n"
        "class Broken(Task):\n"
        "    def __init__(self): self.model = nn.Linear(2, 2)\n"
        "    def dataset(self, split): return [(torch.zeros(2), 0)] * 4\n"
        "    def loss(self, model, batch): raise ValueError('my mistake')\n"
        "def build() -> Task: return Broken()\n"
    )
    result = run_here(f"{PAIR} parallelism=auto --task broken.py", tmp_path)
    assert result.code == 70
    assert "ValueError: my mistake" in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_planning_a_pipeline_requires_layers(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "undivided.py").write_text(
        "import torch\nfrom torch import nn\nfrom runner import Task\n"
        "class Undivided(Task):\n"
        "    def __init__(self): self.model = nn.Linear(2, 2)\n"
        "    def dataset(self, split): return [(torch.zeros(2), 0)] * 4\n"
        "    def loss(self, model, batch): return model(batch[0]).sum(), 1\n"
        "def build() -> Task: return Undivided()\n"
    )
    result = server.run(f"{PAIR} parallelism=pipeline --task undivided.py", tmp_path)
    assert result.code == 70
    assert "must define layers()" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [f"{PAIR} parallelism=pipeline", "train parallelism=pipeline parallelism.world_size=2"]
)
def test_a_task_without_pipeline_support_gets_alternatives(args: str, tmp_path: Path) -> None:
    result = run_here(f"{args} task=dynamo", tmp_path)
    assert result.code == 78, result.err
    assert {"parallelism=ddp", "parallelism=fsdp"} <= set(suggested(result.err.splitlines()[-1]))
    assert not list(tmp_path.rglob("checkpoints/*")), "the error must be reported before training"


@pytest.mark.slow
def test_auto_selects_ddp_if_a_task_cannot_be_divided(tmp_path: Path) -> None:
    result = run_here(f"{PAIR} parallelism=auto task=dynamo", tmp_path)
    assert result.code == 0, result.err
    assert re.search(r"^parallelism +ddp +auto: ", result.out, re.M)


@pytest.mark.slow
def test_the_profile_of_two_gpus_splits_an_update(tmp_path: Path) -> None:
    """A run that does not fit gets remedies."""
    result = run_here("plan +hardware=pair_11gb_8gb task.size=tiny", tmp_path)
    assert result.code == 0, result.err
    assert re.search(r"^.* = micro-batch 8 x 1 .* x 2 ranks", result.out, re.M)
    assert re.search(r"^parallelism +ddp +auto: ", result.out, re.M), result.out
    assert suggested(result.out.splitlines()[-1]) == ["hardware=pair_11gb_8gb", "task.size=tiny"]
    pair = "plan +hardware=pair_11gb_8gb task.size=tiny"
    messages = run_here(f"{pair} global_batch_size=800000 micro_batch_size=400000", tmp_path)
    assert messages.code == 0, messages.err
    assert re.search(r"^note: parallelism=auto: .* 400000 ", messages.out, re.M)
    assert "DOES NOT FIT" in messages.out
    assert "layers  " not in messages.out, "a remedy for pipelines is listed without a pipeline"
    rows = re.findall(r"^ *[\d.]+ [GM]iB  +x [\d.]+  micro_batch_size=(\d+)$", messages.out, re.M)
    assert rows
    assert all(int(size) < 400000 for size in rows)


@pytest.mark.slow
def test_the_small_gpu_profile_recomputes_nothing_if_possible(tmp_path: Path) -> None:
    """The profile selects memory=budget, which must not slow down a run that fits without recomputation."""
    profile = "plan +hardware=rtx3050ti_4gb task.size=tiny"

    def find_recomputed(args: str) -> list[str]:
        result = run_here(args, tmp_path)
        assert result.code == 0, result.err
        return re.findall(r"^memory\.recompute +(\[.*?\]) ", result.out, re.M)

    large = f"{profile} global_batch_size=2600 micro_batch_size=2600"
    fits, does_not_fit = find_recomputed(profile), find_recomputed(large)
    assert fits == ["[]"]
    assert len(does_not_fit) == 1
    assert does_not_fit != fits


@pytest.mark.slow
def test_eight_gpus_can_be_planned_by_profile_or_count(server: ForkServer, tmp_path: Path) -> None:
    result = server.run("plan +hardware=h100 parallelism.world_size=8", tmp_path)
    assert result.code == 0, result.err
    devices = re.findall(r"cuda:(\d+): NVIDIA H100", result.out)
    assert devices == list("01234567")
    assert re.search(r"^update time +[\d.]+ ms", result.out, re.M)
    assert result.out.count(" fits\n") == 1, "ranks must have equal shares"
