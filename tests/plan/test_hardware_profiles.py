"""Profiles in conf/hardware: facts have sources, and profiles select existing options that do not change results."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from runner.config.composition import version_base
from runner.plan.inventory import inventory_from_profile

CONF = Path(__file__).resolve().parents[2] / "conf"
NAMES = [
    "a100", "auto", "cpu", "h100", "h200", "pair_11gb_8gb", "rtx3050ti_4gb", "rtx_entry", "rtx_high", "rtx_mid", "t4",
]  # fmt: skip
FACTS = {
    "memory_gib", "capability", "fp16_tensor_tflops", "bf16_tensor_tflops", "tf32_tflops", "fp32_tflops",
    "memory_bandwidth_gb_s", "tdp_w", "link_gb_s", "network_gb_s", "gpus_per_machine",
}  # fmt: skip

# Options that a profile may select. Optimizer, scheduler and task are chosen by the user.
OPTIONS = {
    "precision": {"auto", "fp32", "tf32", "bf16", "fp16"},
    "backend": {"default", "fast", "deterministic"},
    "attention": {"auto", "math", "flash", "efficient", "cudnn"},
    "dataloader": {"default", "thread"},
    "memory": {"none", "checkpoint", "selective", "budget"},
    "prefetch": {"none", "stream", "auto"},
    "parallelism": {"auto"},
}


@cache
def profile(name: str) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.load(CONF / "hardware" / f"{name}.yaml"))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def selected(name: str) -> dict[str, str]:
    return {key: value for entry in profile(name).get("defaults", []) for key, value in entry.items()}


def devices(name: str) -> list[dict[str, Any]]:
    return list(profile(name)["hardware"]["devices"])


def test_the_documented_profiles_exist() -> None:
    assert sorted(path.stem for path in (CONF / "hardware").glob("*.yaml")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_contains_only_facts_and_options(name: str) -> None:
    first_line = (CONF / "hardware" / f"{name}.yaml").read_text().splitlines()[0]

    assert first_line == "# @package _global_"
    assert set(profile(name)) <= {"defaults", "hardware"}
    assert {"title", "devices"} <= set(profile(name)["hardware"]) <= {"title", "devices", "guidance"}


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_selects_existing_options(name: str) -> None:
    for key, option in selected(name).items():
        assert key.startswith("override /"), f"{key} would add a group instead of selecting an option"
        group = key.removeprefix("override /")
        assert option in OPTIONS[group], f"{group}={option}"
        assert not (CONF / group).is_dir() or (CONF / group / f"{option}.yaml").is_file(), f"{group}={option}"


@pytest.mark.parametrize("name", NAMES)
def test_every_fact_has_a_source(name: str) -> None:
    for device in devices(name):
        facts = set(device) - {"name", "kind", "source"}
        assert facts <= FACTS
        assert set(device.get("source", {})) == facts
        assert all(isinstance(text, str) and text for text in device.get("source", {}).values())


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_a_profile_are_consistent(name: str) -> None:
    for device, planned in zip(devices(name), inventory_from_profile(profile(name)["hardware"]).devices, strict=False):
        assert planned.native_bf16 == ("bf16_tensor_tflops" in device)
        assert planned.formats.tf32 == ("tf32_tflops" in device)
        assert planned.formats.fp16 == ("fp16_tensor_tflops" in device)
        assert device["fp16_tensor_tflops"] == device.get("bf16_tensor_tflops", device["fp16_tensor_tflops"])


@pytest.mark.parametrize("name", NAMES)
def test_selected_options_are_native_to_all_devices(name: str) -> None:
    chosen = selected(name)
    for device in inventory_from_profile(profile(name)["hardware"]).devices:
        assert device.native_bf16 or chosen["override /precision"] != "bf16"
        assert device.formats.fp16 or chosen["override /precision"] != "fp16"
        assert device.formats.flash or chosen.get("override /attention") != "flash"


@pytest.mark.parametrize("name", [name for name in NAMES if "guidance" in profile(name)["hardware"]])
def test_guidance_is_marked_as_not_measured(name: str) -> None:
    guidance = profile(name)["hardware"]["guidance"]
    low, high = guidance["speed_up_over_cpu"]

    assert guidance["measured"] is False
    assert "not measured" in guidance["text"]
    assert 1 < low < high
    assert guidance["batch_size_at_least"] >= 16
    assert guidance["source"]


def test_every_tier_has_guidance() -> None:
    tiers = {profile(name)["hardware"].get("guidance", {}).get("tier") for name in NAMES} - {None}

    assert tiers == {"entry-level", "mid-range", "high-end", "professional"}


def test_a_t4_is_planned_without_bfloat16_and_tf32() -> None:
    (device,) = inventory_from_profile(profile("t4")["hardware"]).devices

    assert (device.native_bf16, device.formats.tf32, device.formats.flash) == (False, False, False)
    assert device.formats.fp16


def test_the_profiles_auto_and_cpu_have_no_gpu() -> None:
    assert profile("auto") == {"hardware": {"title": "this machine", "devices": []}}
    assert inventory_from_profile(profile("cpu")["hardware"]).devices == ()


@pytest.mark.parametrize("name", NAMES)
def test_computed_facts_match_their_formula(name: str) -> None:
    for device in devices(name):
        for fact, source in device.get("source", {}).items():
            formula = source.split(";")[0]
            factors = [float(each) for each in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?= \w|,| x|$)", formula)]
            if "computed" in formula and "GHz" in formula:
                assert device[fact] == pytest.approx(math.prod(factors) / 1000, abs=0.05), formula
            elif "computed" in formula and "Gbit/s" in formula:
                assert device[fact] == pytest.approx(math.prod(factors[:2]) / 8), formula


@pytest.mark.slow
def test_the_command_line_overrides_every_profile(tmp_path: Path) -> None:
    for group, options in OPTIONS.items():
        for option in options:
            file = tmp_path / group / f"{option}.yaml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"chosen: {option}\n")
    (tmp_path / "hardware").symlink_to(CONF / "hardware")
    first = {group: min(options) for group, options in OPTIONS.items()}
    lines = ["- _self_", *(f"- {group}: {option}" for group, option in first.items()), "- hardware: auto"]
    (tmp_path / "config.yaml").write_text("defaults:\n" + "".join(f"  {line}\n" for line in lines))

    with hydra.initialize_config_dir(str(tmp_path), **version_base()):
        for name in NAMES:
            composed = hydra.compose("config", [f"hardware={name}"])
            expected = first | {key.removeprefix("override /"): option for key, option in selected(name).items()}
            assert {group: composed[group].chosen for group in OPTIONS} == expected
            assert composed.hardware.title == profile(name)["hardware"]["title"]
        assert hydra.compose("config", ["hardware=t4", "precision=fp32"]).precision.chosen == "fp32"
        assert hydra.compose("config", ["precision=fp32", "hardware=t4"]).precision.chosen == "fp32"
