"""Compare predicted times of updates with measurements, most of them published by other projects.

    python scripts/measure/update_time.py [WORD ...]        rows whose name contains one of the words; all: 8 minutes
    python scripts/measure/update_time.py reducer           our gradient reducer compared with DistributedDataParallel

Needs no GPU. Each row plans the published model (decoder.py), batch and strategy with a hardware profile, as
`accel-run plan` does. Rows marked with * were used to calibrate the constants of runner/plan/update_time.py:
MPT 1b, GPT-2 124M in fp32 and GPT 11M for the efficiency of products, GPT-2 124M for the bytes of compiled operators,
GPT tiny and GPT-2 124M with memory=selective for launch times.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from runner.base.paths import shipped_path
from runner.config.config_files import profile_facts
from runner.config.configuration import compose
from runner.config.request import Request
from runner.forecast.demand import trace_memory_needs
from runner.plan.memory_fit import Demand
from runner.plan.planner import make_plan, planning_inventory
from runner.plan.run_plan import Plan
from runner.plan.update_time import (
    BUBBLE,
    COMMUNICATION,
    LAUNCHES,
    OPTIMIZER,
    OTHERS,
    PRODUCTS,
    DeviceRates,
    UpdateTime,
    find_rank_rates,
    make_ring,
    predict_phase_time,
)

TASK = Path(__file__).with_name("decoder.py")
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md"
TRANSFORMERS = "huggingface/transformers 4.16, docs/source/performance.md, NVlink"
DIST_TRAINER = "hl3816-ops/dist-trainer, kaggle_kernel/benchmark_results.json at commit bf04f82"
DLPERF = "Oneflow-Inc/DLPerf, OneFlow/LanguageModeling/GPT/README.md"
OWN = "docs/results/2026-11-26-h200.md"
OWN_RUNS = "docs/results/2026-11-26-h200-predictions.md"
OWN_H100 = "docs/results/2026-11-27-gpus.md"
CHECKPOINT = ("memory=checkpoint",)
HALF_CHECKPOINT = ("memory=checkpoint", "memory.every=2")

PARTS = (PRODUCTS, OTHERS, OPTIMIZER, LAUNCHES, COMMUNICATION, BUBBLE)

# NVIDIA Turing GPU Architecture whitepaper, appendix
TITAN_RTX = {"memory_gib": 24.0, "fp16_tensor_tflops": 130.5, "fp32_tflops": 16.3, "memory_bandwidth_gb_s": 672.0}

# Facts of devices that differ from those of the profile, as stated by the source of the measurement.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a100_40gb": ("a100", {"memory_gib": 40.0, "memory_bandwidth_gb_s": 1555.0}),  # A100 datasheet, 40 GB SXM
    "h100_100g": ("h100", {"network_gb_s": 12.5}),
    "h100_10g": ("h100", {"network_gb_s": 1.25}),
    # HBM2e with 2.4 TB/s and 500 W; the peak is "between SXM and NVL", here the mean of 989 and 835 TFLOP/s
    "h100_hbm2e": ("h100", {"memory_gib": 94.0, "memory_bandwidth_gb_s": 2400.0, "bf16_tensor_tflops": 912.0}),
    "titan_rtx": ("t4", TITAN_RTX | {"link_gb_s": 50.0}),  # two NVLinks of 25 GB/s in each direction
    "titan_rtx_pcie": ("t4", TITAN_RTX),
    # Tesla V100 datasheet, SXM2 16 GB; NVLink: half of the rate of both directions; a network adapter of 100 Gbit/s
    "v100": (
        "t4",
        {
            "memory_gib": 16.0,
            "capability": [7, 0],
            "fp16_tensor_tflops": 125.0,
            "fp32_tflops": 15.7,
            "memory_bandwidth_gb_s": 900.0,
            "link_gb_s": 150.0,
            "network_gb_s": 12.5,
            "gpus_per_machine": 8,
        },
    ),
}


@dataclass(frozen=True)
class Model:
    """Shape of a model, see decoder.py."""

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = 50368
    num_kv_heads: int = 0
    hidden: int = 0
    is_llama: bool = False

    def overrides(self, num_tokens: int) -> list[str]:
        shape = {
            **vars(self),
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "hidden": self.hidden or 4 * self.width,
            "num_tokens": num_tokens,
        }
        return [f"task.{key}={str(value).lower()}" for key, value in shape.items()]


GPT2 = Model(12, 768, 12, 50304)
LLAMA_8B = Model(32, 4096, 32, 128256, 8, 14336, is_llama=True)
# mosaicml/llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml
MPT = {
    "125m": Model(12, 768, 12), "350m": Model(24, 1024, 16), "760m": Model(24, 1536, 12), "1b": Model(24, 2048, 16),
    "3b": Model(32, 2560, 20), "7b": Model(32, 4096, 32), "13b": Model(40, 5120, 40), "30b": Model(48, 7168, 56),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measurement.

    batch           samples of a micro-batch, micro-batches of a rank per update, number of ranks
    tokens_per_s    throughput of each GPU; alternatively, `seconds` is the time of an update
    is_calibration  used to choose constants of the prediction
    """

    name: str
    source: str
    profile: str
    model: Model
    num_tokens: int
    batch: tuple[int, int, int]
    tokens_per_s: float = 0.0
    seconds: float = 0.0
    overrides: tuple[str, ...] = ()
    is_calibration: bool = False

    @property
    def measured(self) -> float:
        """Return the measured seconds of an update."""
        micro, steps, _ = self.batch
        return self.seconds or micro * steps * self.num_tokens / self.tokens_per_s

    def all_overrides(self) -> list[str]:
        micro, steps, ranks = self.batch
        given = any(override.startswith("parallelism.world_size=") for override in self.overrides)
        strategy = [] if given else [f"parallelism.world_size={ranks}"]
        if not any(override.startswith("parallelism=") for override in self.overrides):
            strategy = ["parallelism=fsdp", "parallelism.communicate=bfloat16", *strategy]
        return [
            f"+hardware={self.profile}",
            f"global_batch_size={micro * steps * ranks}",
            f"micro_batch_size={micro}",
            *self.model.overrides(self.num_tokens),
            *(strategy if ranks > 1 else []),
            *self.overrides,
        ]


def llm_foundry_row(
    profile: str, model: str, num_tokens: int, batch: tuple[int, int, int], tokens_per_s: float, *more: str,
    is_calibration: bool = False,
) -> Row:  # fmt: skip
    """Return a row of llm-foundry's tables: eager PyTorch with FSDP; `more` for activation checkpointing."""
    name = f"MPT {model}, {num_tokens} tokens, {batch[2]} x {profile.partition('_')[0].upper()}"
    return Row(
        name + (", recomputed" if more else ""), FOUNDRY, profile, MPT[model], num_tokens, batch, tokens_per_s,
        overrides=more, is_calibration=is_calibration,
    )  # fmt: skip


def tiny_gpt_row(num_gpus: int, precision: str, samples_per_s: float, *more: str) -> Row:
    """Return a row of dist-trainer: 64 samples of 128 characters per update; attention from separate operators."""
    name = f"GPT 11M, {precision}, {num_gpus} x T4" + (", recomputed" if more else "")
    strategy = ("parallelism=ddp",) if num_gpus > 1 else ()
    return Row(
        name, DIST_TRAINER, "t4", Model(6, 384, 6, 65), 128, (64 // num_gpus, 1, num_gpus), seconds=64 / samples_per_s,
        overrides=(*strategy, f"precision={precision}", "attention=math", "dataloader.num_workers=0", *more),
        is_calibration=(num_gpus, precision, more) == (1, "fp16", ()),
    )  # fmt: skip


def oneflow_row(batch: tuple[int, int, int], seconds: float, *more: str) -> Row:
    """Return a row of OneFlow's GPT benchmark: fused operators, recomputed blocks; `batch` as in Row, per pipeline."""
    strategy = more or (("parallelism=ddp",) if batch[2] > 1 else ())
    name = f"GPT 0.5B, {batch[2] * (4 if more else 1)} x V100" + (", 8 pipelines of 4 stages" if more else "")
    return Row(
        name, DLPERF, "v100", Model(16, 1536, 16, 50688), 2048, batch, seconds=seconds,
        overrides=(*CHECKPOINT, "precision=fp16", "attention=efficient", "compile=regional", *strategy),
    )  # fmt: skip


ROWS = [
    Row("GPT tiny, fp32, 1 x H200", OWN, "h200", Model(4, 128, 4, 256), 64, (32, 1, 1), seconds=0.00561,
        overrides=("precision=fp32",), is_calibration=True),
    Row("GPT-2 124M, 1 x H200", OWN, "h200", GPT2, 1024, (16, 1, 1), seconds=0.04944, is_calibration=True),
    Row("GPT-2 124M, 1 x H200, compiled", OWN, "h200", GPT2, 1024, (16, 1, 1), seconds=0.04139,
        overrides=("compile=default",), is_calibration=True),
    Row("GPT-2 124M, fp32, 1 x H200", OWN_RUNS, "h200", GPT2, 1024, (16, 1, 1), seconds=0.3009,
        overrides=("precision=fp32",), is_calibration=True),
    Row("GPT-2 124M, 4 micro-batches, 1 x H200", OWN_RUNS, "h200", GPT2, 1024, (8, 4, 1), seconds=0.1078),
    Row("GPT-2 124M, 1 x H200, recomputed", OWN_RUNS, "h200", GPT2, 1024, (16, 1, 1), seconds=0.0574,
        overrides=CHECKPOINT),
    Row("GPT-2 124M, 1 x H200, selective", OWN_RUNS, "h200", GPT2, 1024, (16, 1, 1), seconds=0.0749,
        overrides=("memory=selective",), is_calibration=True),
    Row("GPT-2 124M, 1 x H100", OWN_H100, "h100", GPT2, 1024, (16, 1, 1), seconds=0.0557),
    Row("GPT-2 124M, fp32, 1 x H100", OWN_H100, "h100", GPT2, 1024, (16, 1, 1), seconds=0.3053,
        overrides=("precision=fp32",)),
    Row("GPT-2 124M, 4 micro-batches, 1 x H100", OWN_H100, "h100", GPT2, 1024, (8, 4, 1), seconds=0.1291),
    llm_foundry_row("h100", "760m", 2048, (24, 2, 8), 63147),
    llm_foundry_row("h100", "1b", 2048, (14, 1, 8), 45455, is_calibration=True),
    llm_foundry_row("h100", "1b", 2048, (20, 1, 64), 44402),
    llm_foundry_row("h100", "3b", 4096, (5, 6, 8), 20964),
    llm_foundry_row("h100", "7b", 2048, (6, 1, 8), 10643),
    llm_foundry_row("h100", "7b", 4096, (16, 2, 8), 8611, *CHECKPOINT),
    llm_foundry_row("h100", "13b", 2048, (2, 1, 8), 4792),
    llm_foundry_row("h100", "13b", 2048, (2, 1, 64), 4800),
    llm_foundry_row("h100", "30b", 2048, (14, 3, 32), 2308, *CHECKPOINT),
    llm_foundry_row("a100", "125m", 1024, (64, 2, 8), 156468),
    llm_foundry_row("a100", "350m", 2048, (32, 2, 8), 58782),
    llm_foundry_row("a100", "1b", 2048, (14, 4, 8), 20513, is_calibration=True),
    llm_foundry_row("a100", "3b", 2048, (10, 2, 8), 10811),
    llm_foundry_row("a100", "7b", 2048, (6, 2, 8), 4641),
    llm_foundry_row("a100", "7b", 4096, (16, 2, 8), 3684, *CHECKPOINT),
    llm_foundry_row("a100", "13b", 2048, (2, 3, 8), 2262),
    llm_foundry_row("a100_40gb", "7b", 2048, (18, 1, 64), 3665, *CHECKPOINT),
    Row("Llama 3 8B, 64 x A100", TITAN_A100, "a100", LLAMA_8B, 8192, (1, 1, 64), 2904,
        overrides=HALF_CHECKPOINT),
    Row("Llama 3 8B, 8 x H100 (HBM2e, 500 W)", TITAN, "h100_hbm2e", LLAMA_8B, 8192, (2, 1, 8), 5762,
        overrides=HALF_CHECKPOINT),
    Row("Llama 3 8B, 8 x H100 (HBM2e, 500 W), compiled", TITAN, "h100_hbm2e", LLAMA_8B, 8192, (2, 1, 8), 6667,
        overrides=(*HALF_CHECKPOINT, "compile=regional")),
    Row("Llama 3 8B, 128 x H100 (HBM2e, 500 W)", TITAN, "h100_hbm2e", LLAMA_8B, 8192, (2, 1, 128), 5605,
        overrides=HALF_CHECKPOINT),
    Row("Llama 3 8B, 128 x H100 (HBM2e, 500 W), compiled", TITAN, "h100_hbm2e", LLAMA_8B, 8192, (2, 1, 128), 6514,
        overrides=(*HALF_CHECKPOINT, "compile=regional")),
    Row("GPT-2 124M, llm.c, 8 x H100", "KellerJordan/modded-nanogpt, records/101324_llmc/README.md", "h100", GPT2, 1024,
        (64, 1, 8), seconds=0.139, overrides=("parallelism=ddp", "compile=default")),
    Row("GPT-2 124M, nanoGPT, 8 x A100 40 GB", "karpathy/nanoGPT, README.md: 600,000 updates in about 4 days",
        "a100_40gb", GPT2, 1024, (12, 5, 8), seconds=4 * 86400 / 600_000,
        overrides=("parallelism=ddp", "compile=default", "attention=math")),
    *(tiny_gpt_row(*each) for each in (
        (1, "fp32", 368.0), (1, "fp16", 952.2), (2, "fp32", 658.6), (2, "fp16", 1475.3))),
    *(tiny_gpt_row(*each, *CHECKPOINT) for each in (
        (1, "fp32", 289.4), (1, "fp16", 751.8), (2, "fp32", 528.8), (2, "fp16", 1189.1))),
    Row("GPT-2 124M, fp32, 2 x TITAN RTX, NVLink", TRANSFORMERS, "titan_rtx", GPT2, 1024, (4, 1, 2),
        seconds=101.9003 / 200, overrides=("parallelism=ddp", "precision=fp32", "attention=math")),
    Row("GPT-2 124M, fp32, 2 x TITAN RTX, PCIe", TRANSFORMERS, "titan_rtx_pcie", GPT2, 1024, (4, 1, 2),
        seconds=131.4367 / 200, overrides=("parallelism=ddp", "precision=fp32", "attention=math")),
    *(oneflow_row(*each) for each in (
        ((2, 1, 1), 0.40616), ((2, 1, 8), 0.417952), ((2, 1, 16), 0.489674), ((2, 1, 32), 0.518642),
        ((2, 32, 8), 4.006318, "parallelism=pipeline", "parallelism.world_size=32", "parallelism.stages=4"))),
]  # fmt: skip

DDP = ("parallelism=ddp",)
REDUCER_ROWS = [
    Row("8 x H100, NVSwitch", "", "h100", GPT2, 1024, (16, 1, 8), 1.0, overrides=DDP),
    Row("2 x T4, PCIe 3.0", "", "t4", GPT2, 1024, (4, 1, 2), 1.0, overrides=DDP),
    Row("2 x 8 H100, 100 Gbit/s Ethernet", "", "h100_100g", GPT2, 1024, (16, 1, 16), 1.0, overrides=DDP),
    Row("2 x 8 H100, 10 Gbit/s Ethernet", "", "h100_10g", GPT2, 1024, (16, 1, 16), 1.0, overrides=DDP),
]


def trace(row: Row, config_dir: Path) -> tuple[Plan, Demand, dict[str, DeviceRates]]:
    """Return the plan of a row, its traced demand, and the rates of its devices."""
    configuration = compose(Request(tuple(row.all_overrides()), TASK, config_dir))
    inventory, _ = planning_inventory(configuration)
    needs = trace_memory_needs(configuration, inventory)
    if needs.why_not:
        raise SystemExit(f"{row.name}: {needs.why_not}")
    plan = make_plan(configuration, inventory, needs=needs)
    rates = find_rank_rates(plan, [configuration.hardware, *profile_facts().values()])
    return plan, needs.demands[plan.selected[0].name], rates


def predict(row: Row, config_dir: Path) -> UpdateTime:
    """Return the predicted time of a row."""
    plan, demand, rates = trace(row, config_dir)
    time = predict_phase_time(plan, plan.selected[0], demand, rates)
    assert time is not None, "the profile has the rates"
    return time


def write_profiles(folder: Path) -> None:
    """Write the profiles of VARIANTS."""
    (folder / "hardware").mkdir()
    for name, (base, facts) in VARIANTS.items():
        content = yaml.safe_load((shipped_path("conf") / "hardware" / f"{base}.yaml").read_text())
        content["hardware"]["devices"][0] |= {"name": name, **facts}
        (folder / "hardware" / f"{name}.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))


def table(rows: Sequence[Row], config_dir: Path) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield f"| ms | measured | predicted | ratio | {' | '.join(PARTS)} |"
    yield "|" + "---|" * (4 + len(PARTS))
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in rows:
        time = predict(row, config_dir)
        ratio = time.seconds / row.measured
        errors[row.is_calibration].append(ratio - 1)
        cells = [row.name + " *" * row.is_calibration, format_ms(row.measured), format_ms(time.seconds), f"{ratio:.2f}"]
        yield f"| {' | '.join([*cells, *(format_ms(time.part(name)) for name in PARTS)])} |"
    for is_calibration, ratios in errors.items():
        if ratios:
            kind = "calibration" if is_calibration else "other"
            mean = statistics.mean(map(abs, ratios))
            yield f"{len(ratios)} {kind} rows: mean error {mean:.0%}, largest {max(ratios, key=abs):+.0%}"


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits, or rounded to an integer from 100 on."""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if ms >= 100 or ms == 0 else f"{ms:.3g}"


def reducer_table(config_dir: Path) -> Iterator[str]:
    """Yield a table of the reducer of `ddp` and DistributedDataParallel, which send the same buckets.

    accel-run copies gradients into its buckets, which then are the gradients, and sends one more message.
    DistributedDataParallel copies them into its buckets and back by default. With gradient_as_bucket_view=True, it
    still copies in one direction, because gradients that `zero_grad` has set to None are created outside of the buckets
    (torch 2.13). The message has the loss and the number of items. A loop with DistributedDataParallel needs it for the
    same results if the ranks have unequal numbers of items.
    """
    yield "| ms | update | exposed | accel-run | DDP | DDP with gradient_as_bucket_view | the same and the message |"
    yield "|" + "---|" * 7
    for row in REDUCER_ROWS:
        plan, demand, rates = trace(row, config_dir)
        time = predict_phase_time(plan, plan.selected[0], demand, rates)
        ring, device = make_ring([rates[rank.name] for rank in plan.ranks]), rates[plan.device_name]
        assert time is not None, "the profile has the rates"
        assert ring is not None, "the profile has the links"
        copy = device.access_time(2 * sum(demand.model.buckets))
        exposed = time.part(COMMUNICATION) - copy
        message = ring.reduce(16)
        added = [copy + message, 2 * copy, copy, copy + message]
        bare = time.seconds - copy
        cells = [format_ms(bare), format_ms(exposed)]
        cells += [f"+ {format_ms(each)} ({each / bare:.1%})" for each in added]
        yield f"| {row.name} | {' | '.join(cells)} |"
    yield ""
    yield "Without the host time of the reducer, which matters if the host limits the update: an update of a 64-64-10"
    yield "MLP on two CPU ranks takes 1.16 to 1.24 times as long as with DDP (2026-11-27-versions-two-cpu-cores.md)."


def main() -> None:
    """Print the tables."""
    words = sys.argv[1:]
    rows = [row for row in ROWS if not words or any(word in row.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        write_profiles(Path(folder))
        for line in table(rows, Path(folder)) if rows else ():
            print(line, flush=True)
        for line in reducer_table(Path(folder)) if not words or "reducer" in words else ():
            print(line, flush=True)


if __name__ == "__main__":
    main()
