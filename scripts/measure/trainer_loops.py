"""Programs measured by trainers.py: a plain PyTorch loop, accel-run and other trainers, which do the same work."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

WEIGHT_DECAY, CLIP, LOG_EVERY = 0.1, 1.0, 10  # a decay of 0.01 changes the loss by less than the tested bound
TASK = """
import sys
sys.path.insert(0, {folder!r})
import trainer_loops
from runner import Task

def build() -> Task:
    return Measured()

class Measured(Task):
    def __init__(self):
        self.model = trainer_loops.make_network({workload!r})
    def dataset(self, split):
        return trainer_loops.Samples({workload!r}, {total} if split == "train" else 1)
    def loss(self, model, batch):
        x, labels = batch
        return trainer_loops.cross_entropy(model(x), labels, "sum"), labels.numel()
"""


@dataclass(frozen=True)
class Workload:
    """Sizes of a workload: `shape` of an input, or None for windows of `width` random tokens."""

    batch: int
    lr: float
    updates: int
    num_classes: int
    shape: tuple[int, ...] | None
    width: int = 0


WORKLOADS = {
    "mlp": Workload(32, 1e-3, 900, 10, (64,)),
    "cnn": Workload(32, 1e-3, 150, 10, (3, 32, 32)),
    "gpt-tiny": Workload(16, 1e-3, 150, 256, None, 64),
    "gpt-124m": Workload(16, 3e-4, 60, 50257, None, 1024),
}
_hooks: list[Marks] = []  # hooks of the networks of this process


def make_network(workload: str) -> nn.Module:
    """Return the network with the initial weights that all trainers use."""
    torch.manual_seed(0)
    if workload == "mlp":
        network: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    elif workload == "cnn":
        sizes = ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2))
        layers = ((nn.Conv2d(a, b, 3, step, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()) for a, b, step in sizes)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
        network = nn.Sequential(*itertools.chain(*layers), *head)
    else:
        gpt: Any = importlib.import_module("runner.tasks.gpt.task")
        network = gpt.Transformer(gpt.SHAPES[workload.removeprefix("gpt-")])
    for hook in _hooks:
        network.register_forward_pre_hook(hook)
    return network


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The samples (input, labels) of `num_updates` updates; they repeat after 1024 samples."""

    def __init__(self, workload: str, num_updates: int) -> None:
        kind, generator = WORKLOADS[workload], torch.Generator().manual_seed(1)
        self.length = num_updates * kind.batch
        if kind.shape is None:
            tokens = torch.randint(kind.num_classes, (1024, kind.width + 1), generator=generator)
            self.x, self.labels = tokens[:, :-1], tokens[:, 1:]
        else:
            self.x = torch.randn(1024, *kind.shape, generator=generator)
            self.labels = torch.randint(kind.num_classes, (1024,), generator=generator)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index % 1024], self.labels[index % 1024]


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in float32, even under autocast, without a float32 copy of the logits."""
    log_probabilities = F.log_softmax(logits.view(-1, logits.shape[-1]), dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities, labels.reshape(-1), reduction=reduction)


class WithLoss(nn.Module):
    """A network and its loss, with the interface that transformers expects."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.network(x), labels)}


class Job:
    """What this process measures; `total` is one more than the number of updates."""

    def __init__(self, name: str, updates: int, *, device: str, precision: str, has_bars: bool) -> None:
        self.name, self.device, self.has_bars = name, device, has_bars
        self.is_bf16, self.total = precision == "bf16", updates + 1
        self.workload, self.folder = WORKLOADS[name], Path.cwd()

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        """Return the model with its loss, its optimizer, and the schedule."""
        model = WithLoss(make_network(self.name)).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), self.workload.lr, weight_decay=WEIGHT_DECAY, fused=True)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / self.total)

    def loader(self) -> DataLoader[Any]:
        samples = Samples(self.name, self.total)
        return DataLoader(samples, self.workload.batch, shuffle=False, pin_memory=self.device == "cuda")


class Marks:
    """Forward pre-hook of the network: takes the times, then writes the result and ends the process."""

    def __init__(self, job: Job) -> None:
        self.job, self.last = job, job.total - 1
        self.num_updates, self.began = 0, (0.0, 0.0)

    def __call__(self, network: nn.Module, inputs: object) -> None:
        if not (network.training and torch.is_grad_enabled()):
            return  # a check before the first update
        if self.num_updates == self.last // 3:
            self.began = self.now()
        elif self.num_updates == self.last:
            self.finish(network, self.now())
        self.num_updates += 1

    def now(self) -> tuple[float, float]:
        if self.job.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def finish(self, network: nn.Module, ended: tuple[float, float]) -> None:
        """Write milliseconds per update, peak memory, loss and number of log rows; the end of training is not run."""
        job, ms = self.job, 1e3 / (self.last - self.last // 3)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        where = f"CPU, {torch.get_num_threads()} threads"
        if job.device == "cuda":
            where, peak = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated() / 2**20
        x, labels = (each.to(job.device) for each in next(iter(job.loader())))
        with torch.no_grad(), torch.autocast(job.device, enabled=False):
            loss = cross_entropy(network.eval()(x), labels).item()
        rows = sum(len(path.read_text().splitlines()) for path in job.folder.rglob("metrics.*"))
        spent = {"wall": ms * (ended[0] - self.began[0]), "cpu": ms * (ended[1] - self.began[1])}
        result = {**spent, "peak": peak, "loss": loss, "rows": rows, "where": where}
        (job.folder / "result.json").write_text(json.dumps(result))
        os._exit(0)


def run_loop(
    job: Job, parts: tuple[Any, ...], loader: Iterable[Any], *, forward: Any, backward: Any, clip: Any
) -> None:
    """Run a loop as in PyTorch's tutorials."""
    model, optimizer, schedule = parts
    with Path("metrics.jsonl").open("w", buffering=1) as log:
        for step, (x, labels) in enumerate(loader, start=1):
            loss = forward(x, labels)["loss"]
            backward(loss)
            clip(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                log.write(json.dumps({"step": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0]}) + "\n")


def by_hand(job: Job) -> None:
    parts = job.parts()
    forward = torch.autocast(job.device, torch.bfloat16)(parts[0]) if job.is_bf16 else parts[0]
    batches = (tuple(each.to(job.device, non_blocking=True) for each in batch) for batch in job.loader())
    run_loop(job, parts, batches, forward=forward, backward=Tensor.backward, clip=nn.utils.clip_grad_norm_)


def with_accelerate(job: Job) -> None:
    precision = "bf16" if job.is_bf16 else "no"
    accelerator = importlib.import_module("accelerate").Accelerator(mixed_precision=precision, cpu=job.device == "cpu")
    *parts, loader = accelerator.prepare(*job.parts(), job.loader())
    run_loop(job, parts, loader, forward=parts[0], backward=accelerator.backward, clip=accelerator.clip_grad_norm_)


def with_lightning(job: Job) -> None:
    package = "lightning.pytorch" if find_package("lightning") == "lightning" else "pytorch_lightning"
    pl, loggers = importlib.import_module(package), importlib.import_module(f"{package}.loggers")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer, self.schedule = job.parts()

        def training_step(self, batch: Any, batch_index: int) -> Tensor:
            loss: Tensor = self.model(*batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            if job.is_bf16:  # Lightning 2.6 refuses to clip the gradients of a fused optimizer under autocast
                nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            else:
                super().configure_gradient_clipping(optimizer, **settings)

        def configure_optimizers(self) -> Any:
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}

    trainer = pl.Trainer(
        max_steps=job.total, accelerator="gpu" if job.device == "cuda" else "cpu", devices=1, gradient_clip_val=CLIP,
        precision="bf16-mixed" if job.is_bf16 else "32-true", log_every_n_steps=LOG_EVERY,
        logger=loggers.CSVLogger("."), enable_checkpointing=False, enable_progress_bar=job.has_bars,
    )  # fmt: skip
    trainer.fit(Module(), job.loader())


def with_trainer(job: Job) -> None:
    transformers: Any = importlib.import_module("transformers")

    class Log(transformers.TrainerCallback):
        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            log.write(json.dumps({"step": state.global_step, **logs}) + "\n")

    def collate(samples: Any) -> dict[str, Tensor]:
        x, labels = default_collate(samples)
        return {"x": x, "labels": labels}

    arguments = transformers.TrainingArguments(
        "trainer", max_steps=job.total, per_device_train_batch_size=job.workload.batch, max_grad_norm=CLIP,
        bf16=job.is_bf16, use_cpu=job.device == "cpu", train_sampling_strategy="sequential", logging_steps=LOG_EVERY,
        save_strategy="no", report_to="none", disable_tqdm=not job.has_bars,
    )  # fmt: skip
    (model, *optimizers), samples = job.parts(), Samples(job.name, job.total)
    with Path("metrics.jsonl").open("w", buffering=1) as log:
        transformers.Trainer(model, arguments, collate, samples, callbacks=[Log()], optimizers=optimizers).train()


def with_accel_run(job: Job) -> None:
    Path("measured.py").write_text(TASK.format(folder=str(Path(__file__).parent), workload=job.name, total=job.total))
    batch = job.workload.batch
    importlib.import_module("runner.cli").main([
        "train", "--task", "measured.py", f"updates={job.total}", f"global_batch_size={batch}",
        f"micro_batch_size={batch}", f"max_grad_norm={CLIP}", f"log_every={LOG_EVERY}", "sampler=sequential",
        f"optimizer.lr={job.workload.lr}", f"optimizer.weight_decay={WEIGHT_DECAY}", "optimizer.betas=[0.9,0.999]",
        "optimizer.decay_1d=true", "scheduler=linear", "scheduler.warmup=0", f"device={job.device}",
        f"precision={'bf16' if job.is_bf16 else 'fp32'}", "evaluate.every=0", "checkpoint.every=1000000",
    ])  # fmt: skip


TRAINERS: dict[str, tuple[tuple[str, ...], Callable[[Job], None]]] = {  # packages, any of which is needed
    "hand": (("torch",), by_hand),
    "accel-run": (("torch",), with_accel_run),
    "lightning": (("lightning", "pytorch_lightning"), with_lightning),
    "trainer": (("transformers",), with_trainer),
    "accelerate": (("accelerate",), with_accelerate),
}


def find_package(trainer: str) -> str:
    """Return the first installed package of a trainer; empty if there is none."""
    return next((name for name in TRAINERS[trainer][0] if importlib.util.find_spec(name)), "")


def run_job(trainer: str, job: Job) -> None:
    """Run a trainer in this process; `Marks` ends the process."""
    torch.backends.cudnn.allow_tf32 = False  # as accel-run's fp32; for matrix products, that is torch's default
    _hooks.append(Marks(job))
    TRAINERS[trainer][1](job)
