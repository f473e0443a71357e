"""The plan is deterministic, frozen and complete. Every value has a reason, and all problems are reported together."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.base.errors import ConfigError, DeviceMissing, Exit, Problem
from runner.base.shares import equal_shares
from runner.base.text import format_bytes
from runner.config.config_files import selected_options, shipped_options
from runner.config.configuration import Choice, Configuration, compose
from runner.config.request import Request
from runner.launch.on_ranks import devices_of_local_ranks
from runner.launch.training_ranks import configuration_for_ranks
from runner.plan.inventory import GIB, Cpu, Device, Inventory, inventory_from_profile
from runner.plan.memory_fit import Demand, MemoryNeeds, TracedPoint
from runner.plan.memory_trace import Bytes, ModelSizes
from runner.plan.planner import make_plan, plan_one_rank, planning_inventory, should_trace_memory
from runner.plan.rank_devices import RankDevice, find_wrong_world_size, ranks_per_machine
from runner.plan.run_plan import Plan
from runner.workload.division import Batch, divide
from tests.suggestions import suggested

CPU = Cpu("a processor", physical_cores=8, logical_cores=16, memory_bytes=64 * GIB)


def gpu(index: int, name: str, memory_gib: int, capability: tuple[int, int], **other: Any) -> Device:
    return Device("cuda", index, name, f"GPU-{index}", memory_gib * GIB, capability=capability, **other)


T4 = gpu(0, "Tesla T4", 15, (7, 5))
T4_TOO = gpu(1, "Tesla T4", 15, (7, 5))
A100 = gpu(0, "NVIDIA A100-SXM4-80GB", 80, (8, 0))
A100_TOO = gpu(1, "NVIDIA A100-SXM4-80GB", 80, (8, 0))
PAIR = (gpu(0, "NVIDIA GeForce RTX 2080 Ti", 11, (7, 5)), gpu(1, "NVIDIA GeForce RTX 3070", 8, (8, 6)))
GTX = gpu(0, "NVIDIA GeForce GTX 1650", 4, (7, 5))
MI210 = Device("cuda", 0, "AMD Instinct MI210", memory_bytes=64 * GIB, architecture="gfx90a")
MI300 = Device("cuda", 0, "AMD Instinct MI300X", memory_bytes=192 * GIB, architecture="gfx942")
RX7900 = Device("cuda", 0, "AMD Radeon RX 7900 XTX", memory_bytes=24 * GIB, architecture="gfx1100")
MI100 = Device("cuda", 0, "AMD Instinct MI100", memory_bytes=32 * GIB, architecture="gfx908")
RX6800 = Device("cuda", 1, "AMD Radeon RX 6800", memory_bytes=16 * GIB, architecture="gfx1030")
MPS = Device("mps", 0, "Apple GPU", memory_bytes=16 * GIB)
ARC = Device("xpu", 0, "Intel Arc B580", memory_bytes=12 * GIB, architecture="XMX")
IRIS = Device("xpu", 0, "Intel Iris Xe", memory_bytes=4 * GIB)
BROKEN = gpu(0, "Tesla K80", 12, (3, 7), usable=False, why_not="no kernels for capability 3.7")


def machine(*devices: Device, cores: int = 16) -> Inventory:
    return Inventory(devices, dataclasses.replace(CPU, logical_cores=cores))


@cache
def configuration(*args: str) -> Configuration:
    return compose(Request(args))


def plan(*args: str, on: Inventory | None = None) -> Plan:
    return make_plan(configuration(*args), on or machine())


def find_problems(*args: str, on: Inventory | None = None) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        plan(*args, on=on)
    assert caught.value.exit_code == Exit.CONFIG
    return list(caught.value.problems)


# ---------------------------------------------------------------- properties of a plan

WORDS = ("precision.keep_fp32=[head]", "precision=fp16", "optimizer.lr_scales={0:0.5}", "epochs=2", "phases=[train]")


def test_planning_is_deterministic() -> None:
    asked, here = deepcopy(configuration(*WORDS)), machine(*PAIR)
    first = make_plan(asked, here)
    assert make_plan(asked, here) == first
    assert asked == configuration(*WORDS)
    assert here == machine(*PAIR)


def test_plans_share_no_mutable_state() -> None:
    first = plan("precision=auto", on=machine(A100))
    first.choices["precision"].options["keep_fp32"].append("head")
    assert plan("precision=auto", on=machine(A100)).choices["precision"].options["keep_fp32"] == []


@pytest.mark.slow
def test_planning_does_not_import_torch() -> None:
    code = """if True:
        import sys
        from runner.config.configuration import compose
        from runner.config.request import Request
        from runner.plan.inventory import Cpu, Inventory
        from runner.plan.run_plan import Plan
        from runner.plan.planner import make_plan
        plan = make_plan(compose(Request()), Inventory((), Cpu("a processor", 1, 1, 0)))
        assert Plan.from_json(plan.to_json()) == plan
        sys.exit("torch" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_is_frozen() -> None:
    made = plan()
    parts: list[Any] = [made, made.batch, made.settings, made.choices["precision"]]
    for part in parts:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, "other")


@pytest.mark.parametrize("args", [(), WORDS, ("hardware=t4", "task.size=tiny", "run='1'"), ("epochs=0.5",)])
@pytest.mark.parametrize("devices", [(), (T4,), PAIR])
def test_a_plan_survives_serialization_to_json(args: tuple[str, ...], devices: tuple[Device, ...]) -> None:
    made = plan(*args, on=machine(*devices))
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.values() == made.values()
    assert isinstance(again.notes, tuple)


# Keys whose value in a plan may be `auto`, and how the run resolves it.
AUTO_IS_A_VALUE = {
    "attention",  # torch chooses the kernel for each call
    "backend.threads",  # divides the cores among the ranks of a machine, whose number is known when they start
    "checkpoint.every",  # every few minutes
    "memory.channels_last",  # depends on the layers of the model
    "evaluate.every",  # ten times per phase, whose length depends on the data
    "resume",  # resumes if there is a checkpoint
    "tracker.mode",  # online if there is an API key
    "watchdog.data_s",  # follows the longest recent wait
    "watchdog.update_s",  # follows the longest recent update
}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [(), (T4,), (A100,), (MPS,)])
@pytest.mark.parametrize(
    "args", [("backend=auto",), ("tracker=wandb", "optimizer=sgd"), ("dataloader=thread", "optimizer=adam")]
)
def test_every_auto_is_resolved_with_a_reason(args: tuple[str, ...], devices: tuple[Device, ...]) -> None:
    asked, made = configuration(*args), plan(*args, on=machine(*devices))
    left = {key for key, value in made.values().items() if value == "auto"}
    assert left <= AUTO_IS_A_VALUE
    # `hardware` is the name of a profile.
    resolved = {key for key, value in asked.flat().items() if value == "auto"} - left - {"hardware"}
    assert {"device", "precision", "prefetch", "micro_batch_size", "optimizer.kernel"} <= resolved
    assert {key: made.reason(key) for key in resolved if not made.reason(key).startswith("auto: ")} == {}


def test_every_key_with_auto_occurs_in_some_plan() -> None:
    made = plan("tracker=wandb", on=machine())
    assert {key for key, value in made.values().items() if value == "auto"} >= AUTO_IS_A_VALUE - {"evaluate.every"}
    assert configuration("evaluate.every=auto").settings.evaluate.every == "auto"


def test_the_reason_for_an_override_is_its_source() -> None:
    made = plan("seed=3", "precision=fp32", "optimizer.kernel=foreach", "micro_batch_size=1", "global_batch_size=4")
    keys = ("seed", "precision", "optimizer.kernel", "micro_batch_size", "log_every")
    assert [made.reason(key) for key in keys] == ["command line"] * 4 + ["default"]
    assert made.reason("accumulation_steps") == "4 / (1 x 1)"


# ---------------------------------------------------------------- values that depend on the machine


@pytest.mark.parametrize(
    ("here", "device", "precision", "workers", "pin_memory", "prefetch"),
    [
        (machine(), "cpu", "fp32", 0, False, "none"),
        (machine(T4), "cuda:0", "fp16", 8, True, "stream"),
        (machine(A100, cores=4), "cuda:0", "bf16", 3, True, "stream"),
        (machine(A100, cores=1), "cuda:0", "bf16", 0, True, "stream"),
        (machine(*PAIR), "cuda:0", "fp16", 8, True, "stream"),
        (machine(GTX), "cuda:0", "fp32", 8, True, "stream"),
        (machine(MPS), "mps", "fp32", 0, False, "none"),
        (machine(ARC), "xpu:0", "bf16", 0, False, "none"),
        (machine(IRIS), "xpu:0", "fp32", 0, False, "none"),
        (machine(BROKEN), "cpu", "fp32", 0, False, "none"),
    ],
    ids=["cpu", "t4", "a100", "one core", "pair", "gtx", "mps", "xpu", "xpu without matrix units", "unusable"],
)
def test_mechanics_are_derived_from_the_machine(
    here: Inventory, device: str, precision: str, workers: int, pin_memory: bool, prefetch: str
) -> None:
    values = plan(on=here).values()
    keys = ("device", "precision", "dataloader.num_workers", "dataloader.pin_memory", "prefetch")
    assert [values[key] for key in keys] == [device, precision, workers, pin_memory, prefetch]


def test_ranks_of_a_machine_share_its_cores() -> None:
    made = plan("parallelism=ddp", "parallelism.shares=equal", on=machine(*PAIR, cores=8))
    assert made.values()["dataloader.num_workers"] == 3
    reason = "auto: 4 of 8 cores for each rank, minus one for the main process, at most 8 workers"
    assert made.reason("dataloader.num_workers") == reason


@pytest.mark.parametrize(("num_sharing", "workers"), [(None, 3), (2, 3), (1, 7)])
def test_ranks_bound_to_cores_do_not_share_them(num_sharing: int | None, workers: int) -> None:
    """srun binds each rank to its own cores, but makes all GPUs of the machine visible."""
    here = machine(*PAIR, cores=8)
    ranks = [RankDevice.of(gpu, here) for gpu in PAIR]
    made = make_plan(configuration("parallelism=ddp"), here, ranks, num_sharing=num_sharing)
    assert made.values()["dataloader.num_workers"] == workers


@pytest.mark.parametrize("order", [(A100, T4_TOO), (T4, A100_TOO)])
def test_ranks_use_the_precision_of_the_least_capable_gpu(order: tuple[Device, ...]) -> None:
    """Each rank may be on a different machine, so the inventory has only the GPU of rank 0."""
    here = machine(order[0])
    ranks = [RankDevice.of(gpu, here) for gpu in order]
    made = make_plan(configuration("parallelism=ddp"), here, ranks)
    assert made.choices["precision"].name == "fp16"
    assert any("least capable" in note for note in made.notes)
    swapped = make_plan(configuration("parallelism=ddp"), machine(*PAIR), [ranks[1]])
    assert swapped.reason("device") == f"auto: {swapped.device_name}", "not the reason for the GPU with the most memory"
    with pytest.raises(ConfigError):
        make_plan(configuration("parallelism=ddp", "precision=bf16"), here, ranks)


def test_remaining_ranks_keep_the_precision() -> None:
    asked, here = configuration("parallelism=ddp"), machine(A100, T4_TOO)
    both = make_plan(asked, here)
    assert both.choices["precision"].name == "fp16"
    alone = plan_one_rank(asked, here, both, 0)
    assert (alone.device_name, alone.choices["precision"].name) == (A100.name, "fp16")
    kept = configuration_for_ranks(asked, both, [0])
    assert make_plan(kept, here, both.ranks[:1]).choices["precision"].name == "fp16"


@pytest.mark.parametrize(("num_ranks", "requested", "is_wrong"), [(2, "2", False), (2, "3", True), (1, "3", False)])
def test_another_launcher_must_start_the_requested_ranks(num_ranks: int, requested: str, is_wrong: bool) -> None:
    asked = configuration("parallelism=ddp", f"parallelism.world_size={requested}")
    assert bool(find_wrong_world_size(asked.choices["parallelism"], num_ranks)) is is_wrong
    assert find_wrong_world_size(configuration("parallelism=ddp").choices["parallelism"], num_ranks) is None


@pytest.mark.parametrize(
    ("device", "num_ranks", "expected"),
    [
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 1, ["cuda:1"]),
        ("cuda:1", 2, ["cuda:1", "cuda:0"]),
        ("cpu", 2, ["cpu", "cpu"]),
    ],
)
def test_ranks_of_another_launcher_use_the_selected_gpu_first(device: str, num_ranks: int, expected: list[str]) -> None:
    asked = configuration("parallelism=ddp", f"device={device}")
    assert [rank.device for rank in devices_of_local_ranks(asked, machine(T4, T4_TOO), num_ranks)] == expected


def test_the_reason_for_a_device_names_an_unusable_gpu() -> None:
    made = plan(on=machine(BROKEN))
    assert made.reason("device").endswith(f"({BROKEN.name}: {BROKEN.why_not})")
    assert (made.device_name, made.device_uuid) == ("CPU (a processor, 16 cores)", "")


def test_the_gpu_with_the_most_free_memory_is_chosen() -> None:
    large, small = PAIR
    busy = dataclasses.replace(large, free_bytes=2 * GIB)
    full = dataclasses.replace(large, free_bytes=0)
    free = dataclasses.replace(small, free_bytes=7 * GIB)
    assert plan(on=machine(large, small)).device == "cuda:0", "the larger GPU, because free memory is unknown"
    assert plan(on=machine(busy, free)).device == "cuda:1"
    assert plan(on=machine(full, free)).device == "cuda:1"
    made = plan(on=machine(busy, free))
    assert made.reason("device").startswith(f"auto: {small.name}, ")
    assert format_bytes(7 * GIB) in made.reason("device")
    assert format_bytes(large.memory_bytes) in plan(on=machine(large, small)).reason("device"), "its total memory"
    assert made.device_uuid == "GPU-1"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize(("device", "word"), [(ARC, "device=xpu"), (ARC, "device=auto"), (MPS, "device=mps")])
def test_ranks_do_not_share_intel_or_apple_gpus(device: Device, word: str, strategy: str) -> None:
    for ranks in ("parallelism.world_size=auto", "parallelism.world_size=2"):
        (problem,) = find_problems(word, f"parallelism={strategy}", ranks, on=machine(device))
        assert device.torch_name in problem.what
    alone = plan(word, f"parallelism={strategy}", "parallelism.world_size=1", on=machine(device))
    assert [rank.device for rank in alone.ranks] == [device.torch_name]
    assert plan(word, "parallelism=auto", on=machine(device)).world_size == 1


@pytest.mark.parametrize(("device", "word"), [(ARC, "device=xpu"), (MPS, "device=mps")])
def test_other_launchers_do_not_silently_use_the_cpu(device: Device, word: str) -> None:
    here = machine(device)
    ranks = devices_of_local_ranks(configuration(word), here, 2)
    with pytest.raises(ConfigError):
        make_plan(configuration(word, "parallelism=ddp"), here, ranks)


def test_a_requested_device_is_used() -> None:
    assert plan("device=cuda:1", on=machine(*PAIR)).device == "cuda:1"
    assert plan("device=cuda", on=machine(*PAIR)).device == "cuda:0"
    assert plan("device=cpu", on=machine(*PAIR)).device == "cpu"
    assert plan("device=mps", on=machine(MPS)).device == "mps"
    assert plan("device=xpu", on=machine(ARC)).device == "xpu:0"
    assert plan("device=xpu:0", on=machine(ARC)).device == "xpu:0"
    assert plan("device=cpu", on=machine(*PAIR)).reason("device") == "command line"


@pytest.mark.parametrize(
    ("word", "here", "those"),
    [
        ("device=cuda:1", machine(T4), " cuda:0, cpu"),
        ("device=mps", machine(*PAIR), " cuda:0, cuda:1, cpu"),
        ("device=cuda", machine(), " cpu"),
        ("device=cuda", machine(BROKEN), f" ({BROKEN.name}: {BROKEN.why_not}); this machine has cpu"),
    ],
)
def test_a_missing_device_is_reported_with_the_existing_ones(word: str, here: Inventory, those: str) -> None:
    with pytest.raises(DeviceMissing) as caught:
        plan(word, on=here)
    assert caught.value.exit_code == Exit.NO_DEVICE == 69
    (problem,) = caught.value.problems
    assert (problem.where, suggested(problem.fix)) == (word, ["device=auto"])
    assert problem.what.endswith(those)


@pytest.mark.parametrize(("word", "is_named"), [("cuda", True), ("cuda:1", True), ("mps", False), ("xpu", False)])
def test_a_missing_driver_explains_only_missing_cuda_devices(word: str, is_named: bool) -> None:
    with pytest.raises(DeviceMissing) as caught:
        plan(f"device={word}", on=dataclasses.replace(machine(), no_gpu="no driver"))
    assert ("no driver" in str(caught.value)) == is_named


# ---------------------------------------------------------------- errors and fallbacks


REFUSED = [
    ("precision=bf16", machine(T4), "fp16"),
    ("precision=bf16", machine(GTX), "fp32"),
    ("precision=tf32", machine(T4), "fp32"),
    ("precision=tf32", machine(MPS), "fp32"),
    ("precision=tf32", machine(ARC), "fp32"),
    ("precision=bf16", machine(IRIS), "fp32"),
    ("precision=tf32", machine(), "fp32"),
    ("attention=flash", machine(T4), "efficient"),
    ("attention=cudnn", machine(), "auto"),
    ("attention=efficient", machine(), "auto"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "here", "instead"), REFUSED)
def test_impossible_requests_are_rejected(word: str, here: Inventory, instead: str) -> None:
    group = word.partition("=")[0]
    (problem,) = find_problems(word, on=here)
    assert problem.where == word
    assert suggested(problem.fix) == list(dict.fromkeys([f"{group}={instead}", f"{group}=auto"]))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["precision=bf16", "attention=flash", "precision=fp16"])
@pytest.mark.parametrize("here", [A100, MPS], ids=["a100", "mps"])
def test_possible_requests_are_kept(word: str, here: Device) -> None:
    group, _, name = word.partition("=")
    made = plan(word, on=machine(here))
    assert (made.choices[group].name, made.reason(group), made.notes) == (name, "command line", ())


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("selected", "here", "instead"),
    [("precision: bf16", T4, "fp16"), ("precision: tf32", T4, "fp32"), ("attention: flash", T4, "efficient")],
)
def test_unsupported_options_of_a_profile_are_replaced(
    selected: str, here: Device, instead: str, tmp_path: Path
) -> None:
    (tmp_path / "hardware").mkdir()
    profile = f"# @package _global_\ndefaults:\n  - override /{selected}\nhardware:\n  devices: []\n"
    (tmp_path / "hardware" / "mine.yaml").write_text(profile)
    made = make_plan(compose(Request(("hardware=mine",), config_dir=tmp_path)), machine(here))
    assert made.config_dir == str(tmp_path) == Plan.from_json(made.to_json()).config_dir
    group, name = selected.split(": ")
    assert made.choices[group].name == instead
    (problem,) = find_problems(f"{group}={name}", on=machine(here))
    assert made.notes == (f"{group}={name}: {problem.what}; using {instead}",)


def test_overridden_keys_survive_the_replacement_of_their_option() -> None:
    made = plan("hardware=a100", "precision.keep_fp32=[head]", on=machine(T4))
    assert made.choices["precision"].function == "fp16"
    assert made.choices["precision"].options["keep_fp32"] == ["head"]
    lost = plan("hardware=t4", "precision.init_scale=8", on=machine())
    assert ["precision.init_scale=8", "precision=auto"] in [suggested(note) for note in lost.notes]


def test_task_settings_apply_to_the_option_chosen_by_auto(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('SETTINGS = {"precision.keep_fp32": ["head"]}\ndef build(): ...\n')
    asked = compose(Request(task_file=tmp_path / "mine.py"))
    for device in (T4, A100):
        assert make_plan(asked, machine(device)).choices["precision"].options["keep_fp32"] == ["head"]
    assert make_plan(asked, machine()).choices["precision"].options == {}, "all parameters are float32"


def test_options_of_a_gpu_profile_fall_back_on_a_cpu() -> None:
    made = plan("hardware=t4", on=machine())
    selected = selected_options("hardware", "t4")
    assert selected.keys() == {"precision", "attention", "backend"}
    result = {group: made.choices[group].name for group in selected}
    assert result == {**{group: shipped_options()[group] for group in selected}, "precision": "fp32"}
    assert all("profile t4" not in made.reason(group) or "for its GPU" in made.reason(group) for group in selected)
    (note,) = made.notes
    assert note.startswith("profile t4 ")
    assert suggested(note) == ["precision=fp16", "attention=efficient", "backend=fast"]


def test_a_profile_of_two_devices_accepts_one_device() -> None:
    assert (both := plan("hardware=pair_11gb_8gb", on=machine(*PAIR))).world_size == 2
    assert both.choices["parallelism"].name == "ddp"
    for here in (machine(), machine(T4)):
        made = plan("hardware=pair_11gb_8gb", on=here)
        assert (made.choices["parallelism"].name, made.world_size) == ("single", 1)
        assert made.reason("parallelism").startswith("auto: one device")
        assert not any("parallelism" in note for note in made.notes)


@pytest.mark.parametrize("task", ["gpt task.size=124m", "cape", "dynamo", "hyperspectral"])
def test_large_tasks_limit_micro_batches_only_on_a_cpu(task: str) -> None:
    """On a GPU, `auto` selects the largest micro-batch that fits."""
    name, *size = task.split()
    args = [f"task={name}", *(size or ["task.size=full"])]
    on_cpu, on_gpu = plan(*args, on=machine()), plan(*args, on=machine(T4))
    for small, large in zip(on_cpu.selected, on_gpu.selected, strict=True):
        assert small.batch.micro_batch_size < large.batch.micro_batch_size == large.batch.global_batch_size


def test_the_memory_budget_of_an_absent_gpu_is_not_traced() -> None:
    assert plan("hardware=rtx3050ti_4gb", on=machine()).choices["memory"].name == "none"
    assert not should_trace_memory(configuration("hardware=rtx3050ti_4gb"), machine())
    assert should_trace_memory(configuration("hardware=rtx3050ti_4gb", "memory=budget"), machine())


def test_overrides_are_kept_when_the_profile_is_replaced() -> None:
    made = plan("hardware=t4", "backend=deterministic", on=machine())
    assert (made.choices["backend"].name, made.choices["attention"].name) == ("deterministic", "auto")


def test_a_profile_of_another_gpu_is_reported() -> None:
    assert plan("hardware=t4", on=machine(T4)).notes == ()
    assert plan("hardware=pair_11gb_8gb", "parallelism=single", on=machine(*PAIR)).notes == ()
    (note,) = plan("hardware=t4", on=machine(A100)).notes
    for part in ("profile t4", T4.name, A100.name):
        assert part in note


def test_an_idle_gpu_is_reported_unless_intended() -> None:
    (note,) = plan(on=machine(*PAIR)).notes
    assert note.startswith("only 1 of 2 GPUs ")
    assert suggested(note)[0] == "parallelism=auto"
    for chosen in ("parallelism=auto", "hardware=pair_11gb_8gb"):
        assert not any("is used" in note for note in plan(chosen, on=machine(*PAIR)).notes)
    assert plan("hardware=t4", on=machine(T4)).notes == ()


def test_the_cpu_profile_does_not_use_an_unrequested_gpu() -> None:
    made = plan("hardware=cpu", on=machine(A100))
    assert (made.device, made.reason("device")) == ("cpu", "profile cpu")
    assert plan("hardware=cpu", "device=cuda", on=machine(A100)).device == "cuda:0"
    assert not should_trace_memory(configuration("hardware=cpu"), machine(A100))
    assert should_trace_memory(configuration("hardware=cpu", "device=cuda"), machine(A100))


@pytest.mark.parametrize("profile", ["t4", "a100", "pair_11gb_8gb"])
def test_an_absent_machine_can_be_planned_for(profile: str) -> None:
    asked = configuration(f"hardware={profile}")
    here, whose = planning_inventory(asked)
    assert whose.endswith(f"profile {profile}")
    assert here.devices == inventory_from_profile(asked.hardware).devices
    made = make_plan(asked, here)
    assert made.device == "cuda:0"
    assert made.choices["precision"].name == selected_options("hardware", profile)["precision"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [("parallelism=ddp",), ("parallelism=auto",), ()])
def test_plans_may_have_more_gpus_than_the_profile(words: tuple[str, ...]) -> None:
    asked = configuration("hardware=h100", *words, "parallelism.world_size=8", "global_batch_size=64")
    here, _ = planning_inventory(asked)
    made = make_plan(asked, here)
    assert [rank.device for rank in made.ranks] == [f"cuda:{index}" for index in range(8)]
    assert len(set(made.batch.shares)) == 1

    two = configuration(
        "hardware=h100", "parallelism=fsdp", "parallelism.world_size=16", "parallelism.shard_size=auto",
        "global_batch_size=64",
    )  # fmt: skip
    made = make_plan(two, planning_inventory(two)[0])
    assert ranks_per_machine(made.ranks) == (8, 8), "the profile describes machines of 8 GPUs"
    job = ("launcher=slurm", "launcher.nodes=2", "launcher.gpus_per_node=4", "parallelism=ddp", "global_batch_size=64")
    submitted = configuration("hardware=h100", *job)
    assert ranks_per_machine(make_plan(submitted, planning_inventory(submitted)[0]).ranks) == (4, 4)
    assert made.choices["parallelism"].options["shard_size"] == 8
    mixed = configuration("hardware=pair_11gb_8gb", "parallelism=ddp", "parallelism.world_size=3")
    with pytest.raises(DeviceMissing):
        make_plan(mixed, planning_inventory(mixed)[0])


def test_a_strategy_is_chosen_for_a_number_of_ranks() -> None:
    assert plan("parallelism.world_size=2", on=machine(T4, T4_TOO)).choices["parallelism"].function == "ddp"
    assert plan("parallelism.world_size=3", on=machine()).world_size == 3
    assert plan("parallelism.world_size=1", on=machine(T4, T4_TOO)).choices["parallelism"].function == "single"
    with pytest.raises(DeviceMissing):
        plan("parallelism.world_size=3", on=machine(T4, T4_TOO))
    with pytest.raises(ConfigError):
        plan("parallelism=single", "parallelism.world_size=2", on=machine(T4, T4_TOO))


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("prefetch=stream", "none"),
        ("dataloader.pin_memory=true", False),
        ("dataloader.num_workers=17", 17),
        ("precision=fp16", "fp16"),
        ("compile=default", "default"),
    ],
)
def test_options_without_effect_are_reported_once(word: str, value: Any) -> None:
    made = plan(word)
    (note,) = made.notes
    assert note.startswith((f"{word} ", f"{word.partition('=')[0]} "))
    assert made.values()[word.partition("=")[0]] == value


def traced(*models: ModelSizes) -> MemoryNeeds:
    point = TracedPoint(1, Bytes(), 0)
    return MemoryNeeds({str(number): Demand(str(number), (point,), model=model) for number, model in enumerate(models)})


NONE = ModelSizes(shapes_repeat=True)
REPEATED, VARIED = (ModelSizes(num_convolutions=7, shapes_repeat=repeat) for repeat in (True, False))


@pytest.mark.parametrize(
    ("here", "needs", "name", "named"),
    [
        (A100, traced(REPEATED), "fast", "7 convolutions"),
        (MI300, traced(NONE, REPEATED), "fast", "7 convolutions"),
        (A100, traced(REPEATED, VARIED), "default", "vary"),
        (A100, traced(NONE), "default", "no convolutions"),
        (A100, traced(ModelSizes(num_convolutions=7)), "default", "not traced"),
        (A100, None, "default", "not traced"),
        (MPS, traced(REPEATED), "default", "only GPUs"),
        (None, traced(REPEATED), "default", "only GPUs"),
    ],
)
def test_backend_auto_benchmarks_repeated_convolutions(
    here: Device | None, needs: MemoryNeeds | None, name: str, named: str
) -> None:
    given = configuration("backend=auto", "backend.threads=3")
    planned = make_plan(given, machine(*[here] if here else []), needs=needs)
    assert planned.choices["backend"] == Choice(name, name, {"threads": 3})
    assert planned.reason("backend").startswith("auto: ")
    assert named in planned.reason("backend")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("backend=auto",), True),
        (("backend=fast",), False),
        (("backend=fast", "parallelism=fsdp", "parallelism.shard_size=auto"), True),
        (("backend=fast", "parallelism=fsdp", "parallelism.shard_size=all"), False),
    ],
)
def test_backend_and_shard_size_need_a_trace_on_gpus(words: tuple[str, ...], expected: bool) -> None:
    given = configuration(*words, "micro_batch_size=8")
    assert should_trace_memory(given, machine(A100)) is expected
    assert not should_trace_memory(given, machine())


def test_samples_cached_on_the_device_need_no_workers() -> None:
    assert plan("dataloader.cache=device", on=machine(A100)).values()["dataloader.num_workers"] == 0
    (problem,) = find_problems("dataloader.cache=device", "dataloader.num_workers=2", on=machine(A100))
    assert (problem.where, suggested(problem.fix)) == ("dataloader.cache=device", ["dataloader.num_workers=0"])


def test_workers_read_cached_samples_if_that_is_slow() -> None:
    planned, uncached = (plan(*args, on=machine(A100)).values() for args in (["dataloader.cache=memory"], []))
    assert planned["dataloader.num_workers"] == uncached["dataloader.num_workers"] > 0
    assert planned["dataloader.workers_above_ms"] > 0  # to start workers only if reading is slow
    spawned = plan("dataloader.cache=memory", "dataloader.start_method=spawn", on=machine(A100)).values()
    assert spawned["dataloader.num_workers"] == 0  # reading time is not measured


@pytest.mark.slow
def test_all_problems_are_reported_at_once() -> None:
    args = ("precision=bf16", "attention=flash", "dataloader.cache=device", "dataloader.num_workers=2")
    problems = find_problems(*args, on=machine(T4))
    assert [problem.where for problem in problems] == ["precision=bf16", "dataloader.cache=device", "attention=flash"]
    with pytest.raises(ConfigError) as caught:
        plan(*args, "global_batch_size=1", "parallelism=ddp", "parallelism.world_size=2", on=machine(T4, T4_TOO))
    assert len(caught.value.problems) == 4


# ---------------------------------------------------------------- the batch


@given(st.integers(1, 400), st.integers(1, 40) | st.just("auto"))
def test_an_indivisible_batch_suggests_the_nearest_sizes(total: int, micro: Any) -> None:
    result = divide(total, micro, (total,))
    if isinstance(result, Batch):
        assert total == result.micro_batch_size * result.accumulation_steps == result.global_batch_size
        assert micro in ("auto", result.micro_batch_size)
        assert micro != "auto" or result.accumulation_steps == 1
        return
    assert total % micro != 0
    named = [(key, int(size)) for key, size in re.findall(r"(\w+)=(\d+)", result.fix)]
    assert named
    for key, size in named:
        changed = {"global_batch_size": total, "micro_batch_size": micro, key: size}
        total_now = changed["global_batch_size"]
        assert isinstance(divide(total_now, changed["micro_batch_size"], (total_now,)), Batch), result
    if micro < total:
        sizes = {"global_batch_size": range(1, total + micro + 1), "micro_batch_size": range(1, total + 1)}
        for key, candidates in sizes.items():
            typed, step = (total, micro) if key == "global_batch_size" else (micro, None)
            valid = [size for size in candidates if (size % step if step else total % size) == 0]
            below, above = max(size for size in valid if size < typed), min(size for size in valid if size > typed)
            assert [size for name, size in named if name == key] == [below, above]


@given(st.integers(1, 400), st.integers(1, 40) | st.just("auto"), st.integers(2, 9))
def test_the_number_of_ranks_need_not_divide_the_batch(total: int, micro: Any, world_size: int) -> None:
    shares = equal_shares(world_size, total)
    if isinstance(shares, Problem):
        assert world_size > total
        return
    result = divide(total, micro, shares, ragged=True)
    if isinstance(result, Problem):
        assert micro > max(shares)
        return
    assert sum(result.shares) == total
    assert (result.accumulation_steps - 1) * result.micro_batch_size < max(shares)
    assert max(shares) <= result.accumulation_steps * result.micro_batch_size


@pytest.mark.parametrize(
    ("total", "micro", "shares", "instead"),
    [
        (64, 12, (64,), "micro_batch_size=16, or change the update: global_batch_size=60 or global_batch_size=72"),
        (4, 8, (4,), "micro_batch_size=4, or global_batch_size=8"),
        (8, 8, (5, 3), "micro_batch_size=5, or global_batch_size=16"),
    ],
)
def test_an_indivisible_batch_is_reported_with_valid_sizes(
    total: int, micro: Any, shares: tuple[int, ...], instead: str
) -> None:
    result = divide(total, micro, shares)
    assert isinstance(result, Problem)
    assert result.fix.endswith(f" {instead}")


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize(
    ("args", "on", "split_mib"),
    [
        (("parallelism=ddp",), machine(T4, T4_TOO), 25),
        (("parallelism=ddp", "compile.split_mib=0"), machine(T4, T4_TOO), 0),
        (("parallelism=ddp",), machine(T4), 0),
        (("parallelism=fsdp",), machine(T4, T4_TOO), 0),
    ],
    ids=["ddp", "explicit", "one rank", "fsdp"],
)
def test_compiled_graphs_are_split_only_for_ddp(args: tuple[str, ...], on: Inventory, split_mib: float) -> None:
    assert plan("compile=default", *args, on=on).choices["compile"].options["split_mib"] == split_mib


NO_COMPILER = Problem("needs a compiler", fix="install it")
NO_COMPILERS = {"no_cpu_compiler": NO_COMPILER, "no_gpu_compiler": NO_COMPILER}
P100 = gpu(1, "Tesla P100", 16, (6, 0))


@pytest.mark.slow_beyond(2)
@pytest.mark.parametrize("option", ["default", "reduce-overhead", "max-autotune", "regional"])
@pytest.mark.parametrize(
    "here",
    [
        dataclasses.replace(machine(T4), no_gpu_compiler=NO_COMPILER),
        dataclasses.replace(machine(MI300), no_gpu_compiler=NO_COMPILER),
        dataclasses.replace(machine(), no_cpu_compiler=NO_COMPILER),
        machine(T4, P100),
    ],
    ids=["NVIDIA", "AMD", "CPU", "old GPU"],
)
def test_a_missing_compiler_is_reported_before_the_run(option: str, here: Inventory) -> None:
    (problem,) = find_problems(f"compile={option}", "parallelism=ddp", on=here)
    expected = here.why_not_compiled(here.usable[-1] if here.usable else None)
    assert expected is not None
    assert problem == dataclasses.replace(expected, where=f"compile={option}")


@pytest.mark.parametrize(
    ("args", "here"),
    [
        (("compile=default", "compile.backend=eager"), dataclasses.replace(machine(P100), **NO_COMPILERS)),
        (("compile=default",), dataclasses.replace(machine(T4), no_cpu_compiler=NO_COMPILER)),
        (("compile=default", "device=cpu"), dataclasses.replace(machine(P100), no_gpu_compiler=NO_COMPILER)),
        (("compile=default",), dataclasses.replace(machine(ARC), **NO_COMPILERS)),
    ],
    ids=["another backend", "GPU", "CPU", "Intel"],
)
def test_an_unused_compiler_may_be_missing(args: tuple[str, ...], here: Inventory) -> None:
    assert plan(*args, on=here).choices["compile"].uses("default")


def test_compile_of_a_profile_needs_a_compiler() -> None:
    asked = configuration("compile=default", "compile.dynamic=true")
    asked = dataclasses.replace(asked, sources={**asked.sources, "compile": "profile other"})
    made = make_plan(asked, dataclasses.replace(machine(T4), no_gpu_compiler=NO_COMPILER))
    assert made.choices["compile"] == plan(on=machine(T4)).choices["compile"]
    assert any(NO_COMPILER.what in note for note in made.notes)


def test_local_compilers_do_not_affect_plans_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    asked = configuration("+hardware=t4", "compile=default")
    here = dataclasses.replace(machine(), **NO_COMPILERS)
    for other in (planning_inventory(asked)[0], inventory_from_profile(asked.hardware, here)):
        assert make_plan(asked, other).choices["compile"].uses("default")


RANKS = ("parallelism=ddp", "parallelism.world_size=4")


def test_the_batch_description_covers_all_ranks() -> None:
    made = plan("global_batch_size=24", "micro_batch_size=3", *RANKS)
    assert [int(number) for number in re.findall(r"\d+", str(made.batch))] == [24, 3, 2, 4]
    assert made.values()["accumulation_steps"] == 2
    assert plan("global_batch_size=24", "micro_batch_size=auto", *RANKS).values()["micro_batch_size"] == 6


PAIR_WORDS = ("parallelism=ddp", "global_batch_size=32", "precision=fp32")


@pytest.mark.parametrize(
    ("args", "shares", "identity"),
    [
        (("parallelism.shares=memory",), (19, 13), "19 (rank 0: 1 x 19) + 13 (rank 1: 1 x 13)"),
        (("parallelism.shares=[5,3]",), (20, 12), "20 (rank 0: 1 x 20) + 12 (rank 1: 1 x 12)"),
        (("parallelism.shares=[19,13]", "micro_batch_size=8"), (19, 13),
         "19 (rank 0: 2 x 8 + 3) + 13 (rank 1: 1 x 8 + 5)"),
        ((), (16, 16), "micro-batch 16 x 1 accumulation x 2 ranks"),
    ],
)  # fmt: skip
def test_unequal_gpus_split_an_update_as_requested(
    args: tuple[str, ...], shares: tuple[int, ...], identity: str
) -> None:
    made = plan(*PAIR_WORDS, *args, on=machine(*PAIR))
    assert [rank.device for rank in made.ranks] == ["cuda:0", "cuda:1"]
    assert made.batch.shares == shares
    assert str(made.batch).endswith(f" = {identity}")
    assert any(PAIR[0].name in note for note in made.notes), "it determines the format of all ranks"


@pytest.mark.parametrize(
    "word",
    [
        "parallelism.shares=[19,7,6]",
        "global_batch_size=1",
        "micro_batch_size=30",
        "parallelism.shares=[32,0]",
    ],
)
def test_impossible_shares_are_rejected(word: str) -> None:
    assert find_problems(*PAIR_WORDS, word, on=machine(*PAIR))[0].where == word


def test_equal_fsdp_shards_on_unequal_devices_are_reported() -> None:
    for devices, is_said in ((PAIR, True), ((PAIR[0], dataclasses.replace(PAIR[0], index=1)), False)):
        made = plan("parallelism=fsdp", "parallelism.world_size=2", on=machine(*devices))
        notes = [note for note in made.notes if "shards are equal" in note]
        assert bool(notes) == is_said
        assert all("(8 GiB)" in note and "parallelism=pipeline" in note for note in notes)


CANNOT = [
    ("parallelism=pipeline", "compile=default"),
    ("parallelism=fsdp", "parallelism.communicate=bfloat16"),
    ("parallelism=fsdp", "optimizer=sgd", "optimizer.kernel=fused"),
]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("args", CANNOT)
def test_unsupported_combinations_are_rejected(args: tuple[str, ...]) -> None:
    assert find_problems("global_batch_size=32", "precision=fp32", *args, on=machine(*PAIR))[0].where == args[-1]


@pytest.mark.parametrize(("version", "is_refused"), [("2.12.1+cu130", True), ("2.13.0a0+1", False), ("2.14.1", False)])
def test_fsdp_needs_a_torch_version_with_correct_gradients(version: str, is_refused: bool) -> None:
    args, here = ("global_batch_size=32", "parallelism=fsdp"), machine(T4, T4_TOO)
    on = dataclasses.replace(here, torch_version=version)
    if is_refused:
        assert find_problems(*args, on=on)[0].where == "parallelism=fsdp"
    else:
        assert plan(*args, on=on).world_size == 2
    assert plan(*args, "parallelism.world_size=1", on=on).world_size == 1


@pytest.mark.slow
def test_problems_and_notes_of_a_plan_are_printed_completely(screen: Callable[..., None]) -> None:
    pair = machine(*PAIR)
    asked = [
        *(((word,), here) for word, here, _ in REFUSED),
        (("dataloader.cache=device", "dataloader.num_workers=2"), machine(A100)),
        *(((*PAIR_WORDS, word), pair) for word in ("parallelism.shares=[19,7,6]", "micro_batch_size=30")),
        *(((*PAIR_WORDS[1:], *args), pair) for args in CANNOT),
    ]
    messages = [f"{' '.join(args)}\n{problem}" for args, here in asked for problem in find_problems(*args, on=here)[:1]]
    planned = [
        (("hardware=t4", "precision.init_scale=8"), machine()),
        (("hardware=t4",), machine(A100)),
        ((), pair),
        ((*PAIR_WORDS, "parallelism.shares=memory"), pair),
        *(((word,), machine()) for word in ("prefetch=stream", "precision=fp16", "compile=default")),
    ]
    messages += [f"{' '.join(args)}\n" + "\n".join(plan(*args, on=here).notes) for args, here in planned]
    screen("\n\n".join(messages))


def test_implied_options_are_chosen() -> None:
    made = plan("parallelism=fsdp", "optimizer=sgd", on=machine(*PAIR))
    assert made.choices["optimizer"].options["kernel"] == "foreach"
    assert made.choices["memory"].options["channels_last"] is False


def test_more_ranks_than_gpus_are_rejected() -> None:
    with pytest.raises(DeviceMissing, match="3 ranks need as many GPUs, but 2 can be used"):
        plan("parallelism=ddp", "parallelism.world_size=3", on=machine(*PAIR))


def test_the_run_length_is_in_updates_or_epochs() -> None:
    in_updates, in_epochs = plan("updates=7"), plan("epochs=0.5")
    assert (in_updates.settings.updates, in_updates.settings.epochs, in_updates.values()["updates"]) == (7, None, 7)
    assert (in_epochs.settings.updates, in_epochs.settings.epochs, in_epochs.values()["epochs"]) == (None, 0.5, 0.5)
    assert "epochs" not in in_updates.values()
    assert "updates" not in in_epochs.values()


@pytest.mark.parametrize(
    ("args", "goal"),
    [
        ((), ("val/loss", "min")),
        (("early_stopping.metric=val/accuracy", "early_stopping.best_is=max"), ("val/loss", "min")),
        (("early_stopping.patience=3",), ("val/loss", "min")),
        (
            ("early_stopping.patience=3", "early_stopping.metric=val/accuracy", "early_stopping.best_is=max"),
            ("val/accuracy", "max"),
        ),
        (("early_stopping.patience=3", "early_stopping.metric=val/a", "checkpoint.best=val/b"), ("val/b", "min")),
        (("early_stopping.patience=3", "early_stopping.metric=val/a", "checkpoint.best=null"), (None, "min")),
        (("early_stopping.patience=3", "early_stopping.metric=val/a", "checkpoint=off"), (None, "min")),
    ],
)
def test_the_best_checkpoint_uses_the_early_stopping_metric(
    args: tuple[str, ...], goal: tuple[str | None, str]
) -> None:
    """Otherwise, predictions would use a checkpoint from after the best value of the metric that stopped the run."""
    options = plan(*args).choices["checkpoint"].options
    assert (options["best"], options["best_is"]) == goal


@pytest.mark.parametrize(
    ("args", "here", "waits"),
    [
        (("precision=fp16",), machine(T4), False),
        (("precision=fp16", "optimizer.kernel=foreach"), machine(T4), True),
        (("precision=fp16", "optimizer=adamw8bit"), machine(T4), True),
        (("precision=fp32", "optimizer.kernel=foreach"), machine(T4), False),
    ],
)
def test_optimizers_that_synchronize_with_loss_scaling_are_reported(
    args: tuple[str, ...], here: Inventory, waits: bool
) -> None:
    notes = [note for note in plan(*args, on=here).notes if suggested(note)[:1] == ["precision=fp16"]]
    assert bool(notes) == waits


@pytest.mark.parametrize(
    ("device", "format_"),
    [(MI210, "bf16"), (MI300, "bf16"), (RX7900, "bf16"), (MI100, "fp16"), (RX6800, "fp32")],
    ids=lambda value: getattr(value, "architecture", value),
)
def test_precision_auto_depends_on_the_amd_architecture(device: Device, format_: str) -> None:
    here = machine(device)
    assert plan("precision=auto", on=here).choices["precision"].function == format_
    if format_ == "bf16":
        assert plan("precision=bf16", on=here).choices["precision"].function == "bf16"
    else:
        (problem,) = find_problems("precision=bf16", on=here)
        assert device.architecture in str(problem)
    (problem,) = find_problems("precision=tf32", on=here)
    assert device.architecture in str(problem)


def test_amd_gpus_of_two_architectures_use_a_common_precision() -> None:
    both = plan("precision=auto", "parallelism=ddp", on=machine(MI210, RX6800))
    assert both.choices["precision"].function == "fp32", "ranks use a format that all of them support"


def test_cpu_micro_batch_limits_do_not_apply_to_gpus() -> None:
    """Memory is not predicted before a CPU run, so large tasks limit their micro-batches on a CPU."""
    args = ("task=gpt", "task.size=124m")
    on_cpu, on_gpu = plan(*args).batch, plan(*args, on=machine(T4)).batch
    assert (on_cpu.micro_batch_size, on_cpu.accumulation_steps) == (8, 60)
    assert on_gpu.in_one_pass, "the whole share, until memory is traced"
    assert plan(*args, "micro_batch_size=16").batch.micro_batch_size == 16
    assert plan(*args, "global_batch_size=4").batch.micro_batch_size == 4
    assert plan(*args, "parallelism=ddp", "parallelism.world_size=3", "global_batch_size=50").batch.shares == (
        17,
        17,
        16,
    )


def test_prefetching_from_pageable_memory_is_reported() -> None:
    args = ("prefetch=stream", "dataloader.pin_memory=false")
    assert any("dataloader.pin_memory=true" in note for note in plan(*args, on=machine(T4)).notes)
    assert not any("pin_memory" in note for note in plan("prefetch=stream", on=machine(T4)).notes)
