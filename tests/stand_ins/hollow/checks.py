"""Check assumptions about torch's CUDA build on the hollow GPU; run by `scripts/first_contact.sh hollow`.

    python checks.py FOLDER             build into FOLDER, run every check, and print ok or DIFFERS for each
    python checks.py --one NAME ARGS    run one check in this process, which sees the hollow GPU

Kernels return zeros, so only the behavior of the host is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.stand_ins.hollow.stubs import build, environment

SEQUENCES, ALLOCATIONS = 12, 400
Result = tuple[str, bool, str]  # (subject, whether the figures agree, figures)
MIB = 2**20


# ---------------------------------------------------------------- memory


def allocator(settings: str) -> Iterator[Result]:
    """Compare torch's statistics of random allocations with the model in runner/plan/cuda_allocator.py."""
    import torch

    from runner.plan.cuda_allocator import AllocatorSettings, replay

    torch.cuda.init()
    wrong: list[str] = []
    for seed in range(SEQUENCES):
        chance, events, held = random.Random(seed), [], dict[int, Any]()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        for number in range(ALLOCATIONS):
            if held and chance.random() < 0.45:
                gone = chance.choice(sorted(held))
                del held[gone]
                events.append((gone, 0))
            else:
                size = int(2 ** chance.uniform(6, 26.5)) + chance.randrange(512)
                events.append((number, size))
                held[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
        result = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        model = replay(events, AllocatorSettings.parse(settings))
        held.clear()
        if result != (model.allocated, model.reserved):
            wrong.append(f"seed {seed}: {result} instead of {(model.allocated, model.reserved)}")
    yield f"{SEQUENCES} sequences", not wrong, "; ".join(wrong) or "bytes allocated and reserved"


def prediction(args: str) -> Iterator[Result]:
    """Compare the predicted memory of a short run with that of torch's allocator, for the device's kernels."""
    from runner.axes.precision import ScaledHalf
    from runner.config.configuration import compose
    from runner.config.request import Request
    from runner.host.subprocesses import run_in_subprocess
    from runner.plan.inventory import take_inventory
    from runner.plan.overhead import cublas_workspace
    from runner.tools.doctor.contact_checks import RunPrediction, predict_run
    from runner.tools.doctor.findings import CheckContext
    from runner.tools.doctor.first_contact import MEMORY_TOLERANCE

    # No kernel writes the loss scale, so it would be 0, which ends the run.
    ScaledHalf.values = lambda self: {}  # type: ignore[method-assign]
    out = Path(os.environ["HOLLOW_SCRATCH"]) / "outputs"
    own = f"device=cuda:0 updates=3 monitor=off checkpoint=off evaluate.samples=16 run=r output_root={out} {args}"
    compose(Request(tuple(own.split())))
    context = CheckContext(out, out, inventory=take_inventory())
    # Tracing queries CUDA, so children of this process, such as those of the run, could not use CUDA afterwards.
    expected = run_in_subprocess(predict_run, Request(tuple(own.split())), context.required_inventory)
    assert isinstance(expected, RunPrediction), expected
    run(["train", *own.split()])
    import torch

    # The workspace of cuBLAS is allocated by the same allocator; the plan counts it as part of the context.
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspace = held - torch.cuda.memory_allocated()
    allocated = torch.cuda.max_memory_allocated() - workspace
    differs = abs(allocated - expected.allocated) > MEMORY_TOLERANCE * expected.allocated
    figures = f"predicted {expected.allocated / MIB:.1f} MiB, allocated {allocated / MIB:.1f} MiB"
    yield "allocated", not differs, figures
    predicted = cublas_workspace(torch.cuda.get_device_capability(0))
    yield (
        "workspace",
        workspace == predicted,
        f"predicted {predicted / MIB:.3f} MiB, allocated {workspace / MIB:.3f} MiB",
    )


# ---------------------------------------------------------------- kernels


def attention() -> Iterator[Result]:
    """Compare the attention kernels that torch accepts for a call with `refusal_reason` in runner/axes/attention.py."""
    import torch
    from torch.backends.cuda import (
        SDPAParams,
        can_use_cudnn_attention,
        can_use_efficient_attention,
        can_use_flash_attention,
    )

    from runner.axes.attention import refusal_reason

    accepts = {
        "flash": can_use_flash_attention,
        "efficient": can_use_efficient_attention,
        "cudnn": can_use_cudnn_attention,
    }
    device = torch.device("cuda:0")
    total = 0
    wrong: list[str] = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q = torch.empty(2, 4, 128, 64, dtype=dtype, device=device)
        given = SDPAParams(q, q, q, None, 0.0, True, False)
        for name, accepted in accepts.items():
            total += 1
            reason = refusal_reason(name, dtype, device)
            if accepted(given, False) == bool(reason):
                wrong.append(f"{name} {str(dtype)[6:]}: {reason or 'rejected without a reason'}")
    yield f"{total} calls", not wrong, f"{len(wrong)} differ: {'; '.join(wrong[:6])}" if wrong else "all agree"


# ---------------------------------------------------------------- the loop


def waits() -> Iterator[Result]:
    """Run the loop with sync_debug_mode=error, in the test of tests/gpu that needs a CUDA build."""
    from runner.axes.precision import bf16, fp16, fp32, tf32
    from runner.axes.prefetch import none, stream
    from tests.gpu import test_stream_and_precision as there

    for precision in (fp32, tf32, bf16, fp16):
        for prefetch in (none, stream):
            try:
                there.test_loop_and_rows_never_wait_for_the_device(precision, prefetch)
                yield f"{precision.__name__} {prefetch.__name__}", True, "12 updates, none waits"
            except Exception as error:
                yield (
                    f"{precision.__name__} {prefetch.__name__}",
                    False,
                    f"{type(error).__name__}: {error}".splitlines()[0],
                )


# ---------------------------------------------------------------- processes


def contexts(args: str) -> Iterator[Result]:
    """Check that each process has a context only on its own GPU."""
    device = next(word.partition("=")[2] for word in args.split() if word.startswith("device="))
    out = Path(os.environ["HOLLOW_SCRATCH"]) / "outputs"
    run(["train", "updates=1", "monitor=off", "evaluate.samples=16", "run=r", f"output_root={out}", *args.split()])
    library = ctypes.CDLL("libhollow.so")
    result = [number for number in range(int(os.environ["HOLLOW_GPUS"])) if library.hollow_context(number)]
    yield args, result == [int(device[-1])], f"contexts on {result}"


def contexts_by_process(text: str) -> dict[int, list[int]]:
    """Parse the file HOLLOW_CONTEXTS: PID -> devices on which the process created a context, in order."""
    found: dict[int, list[int]] = {}
    for line in text.splitlines():
        pid, device = map(int, line.split())
        found.setdefault(pid, []).append(device)
    return found


def ranks(args: str) -> Iterator[Result]:
    """Check that ranks with a GPU each join torch's NCCL group, train, save and end; collectives are no-ops.

    Each rank has a context on its own GPU, and no process has contexts on both.
    """
    out = Path(os.environ["HOLLOW_SCRATCH"]) / "outputs"
    run(["train", "updates=4", "monitor=off", "evaluate.samples=16", "run=r", f"output_root={out}", *args.split()])
    record = json.loads((out / "r" / "run.json").read_text())
    updates = record["phases"]["train"]["updates"]
    yield "updates", updates == 4, f"{updates} of 4"
    found = sorted(contexts_by_process(Path(os.environ["HOLLOW_CONTEXTS"]).read_text()).values())
    has_one = all(len(devices) == 1 for devices in found)
    yield "contexts", has_one and [0] in found and [1] in found, f"contexts by process: {found}"


HOST_BUFFER = """
import torch, ctypes
from runner.durable import safetensors_writer
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
buffer = safetensors_writer.HostBuffer()
buffer.prepare(safetensors_writer._MIN_THREAD_BYTES, device)
assert buffer._allocator is not None, "no thread was started"
buffer.clear()
buffer.copy(torch.zeros(1 << 20, device=device))
print([number for number in range(2) if ctypes.CDLL("libhollow.so").hollow_context(number)])
"""


def host_buffer() -> Iterator[Result]:
    """Check that the thread that prepares host memory for checkpoints creates no context on the first GPU."""
    done = subprocess.run([sys.executable, "-c", HOST_BUFFER], capture_output=True, text=True, check=False)
    yield "contexts", done.stdout.strip() == "[1]", done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def forks() -> Iterator[Result]:
    """Check that a process can fork after taking the inventory, but not after using CUDA."""
    import torch

    from runner.plan.inventory import take_inventory

    def in_child() -> str:
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                torch.zeros(1, device="cuda")
                os.write(write, b"works")
            except RuntimeError as error:
                os.write(write, str(error).splitlines()[0].encode())
            os._exit(0)
        os.close(write)
        os.wait()
        return os.read(read, 1000).decode()

    here = take_inventory()
    yield "inventory", len(here.usable) == 1, f"{[device.name for device in here.usable]}"
    yield "after the inventory", not torch.cuda.is_initialized(), f"initialized: {torch.cuda.is_initialized()}"
    answer = in_child()
    yield "child after the inventory", answer == "works", answer
    torch.zeros(1, device="cuda")
    answer = in_child()
    yield "child of a process that used CUDA", "Cannot re-initialize CUDA in forked subprocess" in answer, answer


# ---------------------------------------------------------------- compilation


def compiled(capability: str) -> Iterator[Result]:
    """Compile with Inductor and Triton to machine code for this compute capability."""
    import torch

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 8)
    )
    model.to("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch._dynamo.reset()
        name = f"sm_{capability.replace('.', '')} {str(dtype)[6:]}"
        before = set(_machine_code())
        try:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = torch.compile(model)(torch.zeros(32, 64, device="cuda")).square().mean()
            loss.backward()
        except Exception as error:
            yield name, False, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        if dtype == torch.bfloat16 and capability < "8.0":
            skipped = not set(_machine_code()) - before
            yield name, skipped, "Inductor leaves it to eager kernels; the plan refuses precision=bf16 here"
            continue
        made = [path for path in _machine_code() if path not in before]
        targets = {_target(path) for path in made}
        wanted = capability.replace(".", "")
        agree = bool(made) and all(target.startswith(wanted) for target in targets)
        yield name, agree, f"{len(made)} kernels for sm_{', sm_'.join(sorted(targets)) or 'none'}"


def graphs(args: str) -> Iterator[Result]:
    """Run CUDA graphs with accumulation and evaluation: torch rejects outputs that a later replay has overwritten."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    out = Path(os.environ["HOLLOW_SCRATCH"]) / "outputs"
    task = Path(__file__).parents[2] / "gpu" / "task_for_gpus.py"
    own = ["--task", str(task), "device=cuda:0", "run=r", f"output_root={out}", "monitor=off", "log_every=1"]
    size = ["updates=6", "global_batch_size=16", "evaluate.every=2", "evaluate.samples=16"]
    run(["train", *own, *size, *args.split()])
    library = ctypes.CDLL("libhollow.so")
    captures, replays = library.hollow_captures(), library.hollow_replays()
    yield args, 0 < captures < replays, f"6 updates, {captures} graphs captured, {replays} replays"


def _machine_code() -> list[Path]:
    return sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))


def _target(cubin: Path) -> str:
    return str(json.loads(cubin.with_suffix(".json").read_text())["target"]["arch"])


# ---------------------------------------------------------------- running the checks


def run(args: Sequence[str]) -> None:
    """Run accel-run in this process; raise AssertionError with its output if it fails."""
    from runner.cli import main

    sys.argv = ["accel-run", *args]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(list(args))
    assert code == 0, output.getvalue()


CHECKS: dict[str, Callable[..., Iterator[Result]]] = {
    function.__name__: function
    for function in (allocator, prediction, attention, waits, contexts, host_buffer, forks, ranks, compiled, graphs)
}
# (check, its arguments, differences from one GPU with 8 GiB and compute capability 8.0)
PLAN: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    *(
        ("allocator", (settings,), {"mib": 65536, "settings": settings})
        for settings in ("", "expandable_segments:True")
    ),
    *(
        ("attention", (), {"capability": capability})
        for capability in ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
    ),
    ("waits", (), {}),
    ("contexts", ("device=cuda:0 task=gpt micro_batch_size=8",), {"gpus": 2}),
    ("contexts", ("device=cuda:1 task=gpt micro_batch_size=8 prefetch=stream",), {"gpus": 2}),
    ("host_buffer", (), {"gpus": 2}),
    ("forks", (), {}),
    *(("ranks", (f"task=gpt parallelism={name} micro_batch_size=8",), {"gpus": 2}) for name in ("ddp", "fsdp")),
    *(
        (
            "prediction",
            (f"task={task} precision={precision} micro_batch_size=8 global_batch_size=16",),
            {"capability": capability},
        )
        for task, precision, capability in (
            ("gpt", "bf16", "8.0"),
            ("gpt", "fp16", "7.5"),
            ("gpt", "fp16", "8.0"),
            ("gpt", "fp32", "8.0"),
            ("gpt", "fp32", "7.5"),
            ("gpt", "fp32", "9.0"),
            # By default, torch selects cuDNN, which has no execution plan here and crashes.
            ("gpt", "bf16 attention=flash", "9.0"),
        )
    ),
    *(("compiled", (capability,), {"capability": capability}) for capability in ("7.5", "8.0", "9.0")),
    *(
        ("graphs", (f"compile={mode} micro_batch_size={size}",), {"capability": capability})
        for mode, size, capability in (
            ("reduce-overhead precision=bf16", 16, "8.0"),
            ("reduce-overhead precision=bf16", 4, "8.0"),
            ("reduce-overhead precision=fp32 averaging=ema", 8, "7.5"),
            ("reduce-overhead precision=bf16 memory=checkpoint task.dropout=0.5 task.batch_norm=true", 8, "8.0"),
            ("max-autotune precision=bf16", 8, "8.0"),
        )
    ),
)
LIMIT_S = 400


def main(folder: Path, only: str) -> int:
    """Run every check in a separate process; return 1 if any check differs."""
    build(folder)
    names = ("torch", "triton", "nvidia-cuda-runtime", "nvidia-cudnn-cu13")
    print(", ".join(f"{name} {version(name)}" for name in names), f"Python {platform.python_version()}", sep=", ")
    differ = 0
    for number, (name, arguments, changes) in enumerate(PLAN):
        if only and name != only:
            continue
        settings = {"PYTORCH_CUDA_ALLOC_CONF": changes.pop("settings")} if changes.get("settings") else {}
        changes.pop("settings", None)
        scratch = folder / "scratch" / str(number)
        shutil.rmtree(scratch, ignore_errors=True)  # runs and compiled kernels of an earlier call
        scratch.mkdir(parents=True)
        env = environment(folder, **changes) | settings
        env |= {"HOLLOW_SCRATCH": str(scratch), "HOLLOW_CONTEXTS": str(scratch / "contexts")}
        env |= {"TRITON_CACHE_DIR": str(scratch / "triton")}
        env |= {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), "OMP_NUM_THREADS": "1"}
        line = [sys.executable, __file__, "--one", name, *arguments]
        with (scratch / "err").open("w") as errors:
            done = subprocess.run(
                line, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=LIMIT_S, check=False
            )
        result = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("[")]
        title = " ".join([name, *filter(None, (*arguments, changes.get("capability", "")))])
        for what, agrees, figures in result:
            differ += not agrees
            print(f"{'ok' if agrees else 'DIFFERS':<8}{title}: {what}: {figures}", flush=True)
        if done.returncode or not result:
            differ += 1
            last = [text for text in (scratch / "err").read_text().splitlines() if text.strip()][-1:]
            print(f"DIFFERS {title}: ended with {done.returncode}: {''.join(last)}", flush=True)
    print(f"{differ} differ" if differ else "everything agrees")
    return 1 if differ else 0


def one(name: str, arguments: Sequence[str]) -> int:
    """Run one check in this process and print its results as lines of JSON."""
    try:
        for result in CHECKS[name](*arguments):
            print("\n" + json.dumps(result), flush=True)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        code = one(sys.argv[2], sys.argv[3:])
        sys.stdout.flush()
        os._exit(code)  # skip the exit handlers of libraries
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2] if len(sys.argv) > 2 else ""))
