"""Complete runs on one GPU: out of memory, stopped and resumed, repeated, exported, and used for inference."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runner.base.accelerator import torch_devices
from tests.gpu.runs import OF_OUTPUT, OTHER_KERNELS, SAME_CURVE, Runs, losses, plan_of, weights
from tests.rounding import allowed, distance

pytestmark = pytest.mark.gpu
TABLES = Path(__file__).parents[1] / "trained/task_with_tables.py"
PLAIN = "device=cuda:0 precision=fp32"
RANDOM = "task.dropout=0.5"
SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


# ---------------------------------------------------------------- out of memory


@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_an_update_repeated_after_oom_has_the_same_result(place: str, runs: Runs) -> None:
    short = runs.curve("short", f"{PLAIN} task.short_in={place}")
    assert short == pytest.approx(losses(runs.straight(PLAIN)), rel=SAME_CURVE)


def test_on_oom_stop_reports_what_uses_memory(runs: Runs) -> None:
    """The run ends."""
    folder = runs.train("short", "device=cuda:0 task.short_in=forward on_oom=stop", code=80)
    error = json.loads((folder / "error.json").read_text())
    assert "GiB" in json.dumps(error)


# ---------------------------------------------------------------- stopped, resumed, repeated


@pytest.mark.parametrize(
    "args",
    [f"{RANDOM} precision=fp32", f"{RANDOM} precision=fp16", f"{RANDOM} prefetch=stream", "task.batch_norm=true"],
)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(args: str, runs: Runs) -> None:
    args = f"device=cuda:0 backend=deterministic {args}"
    uninterrupted = runs.straight(args)
    stopped = runs.stopped(args)
    assert runs.end("resume stopped").code == 0
    assert losses(stopped) == losses(uninterrupted)
    mine, other = weights(stopped), weights(uninterrupted)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_deterministic_runs_are_bitwise_reproducible(precision: str, runs: Runs) -> None:
    args = f"device=cuda:0 backend=deterministic {RANDOM} precision={precision}"
    first, second = weights(runs.straight(args)), weights(runs.train("second", args))
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name


@pytest.mark.parametrize(
    "args",
    [
        *("memory=checkpoint", "dataloader.num_workers=2", "micro_batch_size=4", "prefetch=none"),
        *("dataloader.num_workers=auto", "dataloader.num_workers=2 dataloader.workers_above_ms=1000"),
    ],
)
def test_mechanics_do_not_change_the_loss_curve(args: str, runs: Runs) -> None:
    plain = losses(runs.straight(PLAIN))
    assert runs.curve("other", f"{PLAIN} {args}") == pytest.approx(plain, rel=SAME_CURVE)


def test_a_gpu_and_the_cpu_have_the_same_loss_curve(runs: Runs) -> None:
    on_cpu = runs.curve("cpu", "device=cpu precision=fp32")
    assert losses(runs.straight(PLAIN)) == pytest.approx(on_cpu, rel=OTHER_KERNELS)


# ---------------------------------------------------------------- choice of GPU, precision and kernels


def test_precision_auto_is_natively_supported_by_the_gpu(runs: Runs) -> None:
    capability = torch.cuda.get_device_capability(0)
    result = plan_of(runs.train("auto", "device=cuda:0 precision=auto"))["choices"]["precision"]["function"]
    assert result == ("bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32")


@SEVERAL
@pytest.mark.parametrize("by", ["number", "uuid"])
def test_only_gpus_listed_in_cuda_visible_devices_are_used(by: str, runs: Runs) -> None:
    uuid = f"GPU-{list(torch_devices())[1].uuid}"
    env = {"CUDA_VISIBLE_DEVICES": "1" if by == "number" else uuid}
    plan = plan_of(runs.train("one", "device=cuda", env=env))
    assert (plan["device"], plan["device_uuid"]) == ("cuda:0", uuid)


@SEVERAL
def test_training_can_use_only_the_second_gpu(runs: Runs) -> None:
    second = runs.curve("second", "device=cuda:1 precision=fp32")
    assert second == losses(runs.straight(PLAIN))
    assert plan_of(runs.folder / "outputs/second")["device"] == "cuda:1"


def test_a_missing_gpu_is_rejected(runs: Runs) -> None:
    assert runs.end("train device=cuda:7").code == 69


@pytest.mark.parametrize("option", ["default", "reduce-overhead", "max-autotune"])
def test_a_compiled_model_has_the_same_losses(option: str, runs: Runs) -> None:
    """Training, accumulation and evaluation call it with different shapes and modes. Without Triton, it is rejected."""
    if find_spec("triton") is None:
        runs.train("compiled", f"{PLAIN} compile={option}", code=78)
        return
    plain = losses(runs.straight(PLAIN))
    assert runs.curve("compiled", f"{PLAIN} compile={option}") == pytest.approx(plain, rel=OTHER_KERNELS)


@pytest.mark.parametrize("option", ["default", "regional"])
def test_a_traced_model_has_the_same_loss_curve(option: str, runs: Runs) -> None:
    """The backend runs the graphs of Dynamo and AOTAutograd with eager kernels, so it needs no Triton."""
    plain = losses(runs.straight(PLAIN))
    args = f"{PLAIN} compile={option} compile.backend=aot_eager"
    assert runs.curve("traced", args) == pytest.approx(plain, rel=SAME_CURVE)


def test_an_8_bit_optimizer_learns_or_reports_a_missing_package(runs: Runs) -> None:
    args = "device=cuda:0 precision=fp32 optimizer=adamw8bit task.width=128"
    if find_spec("bitsandbytes") is None and find_spec("torchao") is None:
        runs.train("eight", args, code=78)
        return
    result = runs.curve("eight", args)
    assert result[6] < result[1]


# ---------------------------------------------------------------- export and inference


def test_an_exported_program_gives_the_outputs_of_the_model(runs: Runs) -> None:
    folder = runs.copy_of_straight(PLAIN)
    result = runs.end("export straight format=safetensors,program")
    assert result.code == 0, result.err
    parity = json.loads((folder / "export/parity.json").read_text())
    assert parity
    trained = weights(folder)
    for name, tensor in load_file(folder / "export/model.safetensors").items():
        assert torch.equal(tensor, trained[f"model/{name}"])


def test_inference_predicts_the_same_on_every_device(runs: Runs) -> None:
    folder, scores = runs.copy_of_straight(PLAIN), []
    for device in ("cpu", "cuda:0", "cuda:1")[: 1 + torch.cuda.device_count()]:
        result = runs.end(f"inference straight device={device}")
        assert result.code == 0, result.err
        scores.append(np.load(folder / "predictions/scores.npy"))
    for other in scores[1:]:
        assert distance(scores[0], other) <= allowed(
            torch.float32, OF_OUTPUT, growth=4
        )  # growth=4: tanh is accurate to 2 ulp, an addition to 1/2 ulp (see OTHER_KERNELS)


def test_tables_of_predictions_are_the_same_on_every_device(runs: Runs) -> None:
    """The rows, their order and the random numbers of each sample are identical; the scores agree within rounding."""
    result = runs.end(f"train --task {TABLES} run=tables device=cpu precision=fp32 monitor=off")
    assert result.code == 0, result.err
    tables = []
    for device in ("cpu", "cuda:0"):
        result = runs.end(f"inference tables device={device} inference.split=test inference.batch_size=8")
        assert result.code == 0, result.err
        with (runs.folder / "outputs/tables/predictions/test.csv").open(encoding="utf-8", newline="") as lines:
            tables.append([*csv.DictReader(lines)])
    host, device_ = tables
    for column in ("index", "name", "draw"):
        assert [row[column] for row in host] == [row[column] for row in device_]
    scores = [[[float(row["score.0"]), float(row["score.1"])] for row in table] for table in tables]
    assert distance(*scores) <= allowed(torch.float32, terms=12)
