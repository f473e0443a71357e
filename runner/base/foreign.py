"""Words people bring from other tools, and what to say here instead: answered with it, never taken for it silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

# Other names of the options of precision, which are understood.
PRECISION_NAMES = {
    "32": "fp32", "32-true": "fp32", "float32": "fp32", "full": "fp32",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16",
}  # fmt: skip

_OWN_TASK = "a file of yours holds the model: accel-run new my_task.py, then --task ./my_task.py"
_RANKS = "parallelism=ddp parallelism.world_size={}"
_BATCH = "global_batch_size={} (samples per update) or micro_batch_size={} (samples per pass)"
_ACCUMULATION = "global_batch_size=64 micro_batch_size=16; accumulation follows: 64 = 16 x 4"
_RESUME = "accel-run resume, or resume NAME; a new run that starts from another one: resume=NAME"

# what to say -> the keys of other trainers; {} stands for the value that was given
_SAY: Mapping[str, str] = {
    _BATCH: "batch_size bs batchsize",
    "global_batch_size={}": "train_batch_size total_batch_size",
    "micro_batch_size={}": "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    _ACCUMULATION: "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum_steps",
    "max_grad_norm={}": "clip_max_norm gradient_clip_val gradient_clip gradient_clipping grad_clip clip_grad "
    "clip_grad_norm max_norm clip",
    "epochs={}": "max_epochs num_epochs num_train_epochs n_epochs epoch",
    "updates={}": "max_steps steps num_steps train_steps iterations iters max_iters num_iterations",
    "optimizer.lr={}": "lr learning_rate optimizer.learning_rate base_lr",
    "optimizer.weight_decay={}": "weight_decay wd",
    "optimizer=sgd optimizer.momentum={}": "momentum",
    "optimizer.betas={}": "betas",
    "optimizer={}": "optim opt",
    "scheduler={}": "lr_scheduler lr_scheduler_type sched",
    "scheduler.warmup={}": "warmup_steps num_warmup_steps warmup warmup_ratio",
    "seed={}": "random_seed manual_seed rng_seed",
    "device=cuda": "accelerator use_cuda cuda gpu use_gpu",
    "device=cpu": "no_cuda cpu use_cpu",
    f"{_RANKS}, or device=cuda:0 for one of them": "devices gpus num_gpus ngpus n_gpus gpu_ids",
    _RANKS: "nproc_per_node world_size num_processes nprocs",
    "launcher=slurm launcher.nodes={}, or torchrun: docs/scale.md": "num_nodes nnodes nodes",
    "parallelism={}": "strategy distributed_strategy",
    "parallelism=ddp": "distributed ddp data_parallel dp",
    "parallelism=fsdp": "fsdp zero_stage deepspeed",
    "parallelism=ddp; its ranks are started here, or by torchrun -m runner": "local_rank rank",
    "precision=fp16, bf16 or fp32": "use_amp amp mixed_precision use_mixed_precision autocast",
    "precision=fp16": "fp16 half",
    "precision=fp32": "no_use_amp no_amp fp32 float32",
    "precision=bf16": "bf16",
    "precision=tf32": "tf32 allow_tf32",
    "dataloader.num_workers={}": "num_workers workers dataloader_num_workers",
    "dataloader.pin_memory={}": "pin_memory",
    "dataloader.prefetch_factor={}": "prefetch_factor",
    "leave it out: the workers live as long as the run": "persistent_workers dataloader.persistent_workers",
    "data.path={}": "data dataset data_dir data_path dataroot data_root train_data data.dir data.root",
    "task.size={}": "size model_size",
    f"task=NAME for one of ours; {_OWN_TASK}": "model model_name arch network backbone net script",
    "run={}": "name run_name exp_name experiment experiment_name run_id job_name",
    "output_root={}, and run=NAME for the folder in it": "output_dir save_dir log_dir logdir out_dir default_root_dir "
    "work_dir checkpoint_dir",
    "checkpoint.every={}": "save_every save_steps save_interval checkpoint_every save_freq",
    "checkpoint.keep={}": "save_total_limit save_top_k",
    "evaluate.every={}": "eval_every eval_steps eval_interval val_every val_check_interval check_val_every_n_epoch",
    "log_every={}": "log_interval logging_steps log_every_n_steps print_freq log_freq",
    "early_stopping.patience={}": "patience early_stopping_patience early_stopping",
    _RESUME: "resume_from resume_from_checkpoint ckpt_path ckpt checkpoint_path load_checkpoint",
    "weights={} (safetensors; of a .pt: accel-run import)": "pretrained init_from load_from weights_path load_weights",
    "memory=checkpoint": "gradient_checkpointing activation_checkpointing checkpoint_activations grad_checkpoint",
    "attention=flash": "flash_attention use_flash flash flash_attn use_flash_attention attn_implementation",
    "backend=deterministic": "deterministic cudnn_deterministic",
    "backend=fast": "cudnn_benchmark cudnn.benchmark",
    "compile=default": "torch_compile use_compile torchcompile",
    "tracker=wandb": "wandb use_wandb logger report_to",
    "tracker=wandb tracker.project={}": "wandb_project project",
    "tracker=tensorboard": "tensorboard use_tensorboard",
    "--config-dir DIR, a folder with files of yours": "config config_file config_path cfg c config_name",
    "resume=fresh": "no_resume overwrite",
    "phases=[{}], with names of the task's phases": "phase",
    "accel-run status": "status",
    "trials={}, in accel-run search": "n_trials",
    "goal=min or goal=max, in accel-run search and train -m": "direction",
    "accel-run monitor seconds=30: it trains nothing": "monitor_only",
    "accel-run train --help": "help h",
    "accel-run --version": "version v",
}
FOREIGN_KEYS: Mapping[str, str] = {key: say for say, keys in _SAY.items() for key in keys.split()}

# group -> what to say -> other names of the option
FOREIGN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "scheduler": {
        "cosine": "cosine_annealing cosineannealinglr cosine_with_warmup cosineannealing",
        "warm_restarts": "cosineannealingwarmrestarts cosine_with_restarts",
        "one_cycle": "onecycle onecyclelr 1cycle",
        "plateau": "reducelronplateau reduce_on_plateau",
        "multistep": "multisteplr multi_step",
        "step": "steplr",
        "linear": "linearlr linear_with_warmup",
        "constant": "none off null no constant_with_warmup constantlr",
    },
    "precision": {"fp16 or precision=bf16": "mixed amp true on", "fp32": "none off false no"},
    "compile": {"default": "true on inductor yes"},
    "tracker": {"tensorboard": "tb tensor_board", "wandb": "w&b weights_and_biases"},
    "parallelism": {
        "ddp": "dp data ddp_spawn distributed dataparallel",
        "fsdp": "fsdp2 zero deepspeed zero3",
        "pipeline": "pp gpipe",
    },
    "attention": {"flash": "flash_attention_2 flash2 flash_attention fa2", "math": "eager", "auto": "sdpa"},
    "optimizer": {"adamw8bit": "adam8bit 8bit adamw_8bit adam_8bit", "adamw": "adamw_torch adamw_fused"},
    "memory": {"checkpoint": "checkpointing gradient_checkpointing full true"},
    "hardware": {
        "auto": "gpu cuda default",
        "rtx_high": "rtx4090 rtx3090 4090 3090 rtx4080 4080",
        "rtx_mid": "rtx3060 3060 rtx4060 4060",
        "rtx3050ti_4gb": "rtx3050 3050 rtx3050ti 3050ti",
    },
}

# what to type -> words that somebody may take for commands
_COMMANDS: Mapping[str, str] = {
    "accel-run train": "fit run start launch go main",
    "accel-run resume": "continue restart go-on",
    "accel-run inference": "predict generate sample test eval evaluate validate serve",
    "accel-run runs": "list ls history",
    "accel-run status": "show info ps state",
    "accel-run monitor": "watch top nvidia-smi gpu",
    "accel-run doctor": "check diagnose env environment verify",
    "accel-run new my_task.py": "init create scaffold template",
    "accel-run tune": "optimize autotune",
    "accel-run benchmark": "bench speed",
    "accel-run train -m optimizer.lr=0.001,0.003": "sweep grid multirun",
    "accel-run plan": "config settings args options dry-run dryrun",
    "accel-run import FILE.pt": "convert load",
    "accel-run tune, or accel-run advise": "faster",
    "press Ctrl-C where it trains, or kill -TERM its process: all is saved, and accel-run resume goes on": "stop kill "
    "cancel abort",
    "accel-run --version": "version -v",
}
FOREIGN_COMMANDS: Mapping[str, str] = {word: say for say, words in _COMMANDS.items() for word in words.split()}


def fix_of_key(key: str, value: str = "") -> str:
    """Return what to say instead of a key of another tool, with its value; nothing where it is unknown."""
    said = FOREIGN_KEYS.get(key.lower().replace("-", "_"))
    if said and said.startswith("weights=") and value.lower() in ("true", "yes", "1"):
        value = "FILE"
    return _say(said.replace("{}", value or "...")) if said else ""


def fix_of_option(group: str, option: str) -> str:
    """Return what to say instead of an option as another tool calls it; nothing where it is unknown."""
    if group == "dataloader" and option.isdigit():
        return f"say dataloader.num_workers={option}"
    if group == "checkpoint" and re.search(r"[./]", option):
        return f"say {_RESUME}; to begin with its weights: weights={option} (of a .pt: accel-run import)"
    for name, others in FOREIGN_OPTIONS.get(group, {}).items():
        if option.lower() in others.split():
            return f"say {group}={name}"
    return ""


def fix_of_value(key: str, value: object) -> str:
    """Return what to say instead of a value that other tools have for this key; nothing where none is known."""
    text = str(value).lower()
    if key == "device" and (gpu := re.fullmatch(r"(?:gpu|cuda|nvidia)?:?(\d*)", text)):
        return f"say device=cuda{':' if gpu[1] else ''}{gpu[1]}"
    return f"say {_RESUME}" if key == "resume" and text in ("last", "latest", "newest", "true", "yes", "best") else ""


def fix_of_word(word: str, groups: Mapping[str, Collection[str]]) -> str:
    """Return what to say instead of a lone word: the option of a group, a device, a file; nothing where it is none.

    groups  name -> its options
    """
    if word.endswith(".py"):
        return f"say --task {word}"
    if word.endswith((".yaml", ".yml")):
        return "say --config-dir DIR, the folder that holds the file, and GROUP=NAME for the file in it"
    if word.startswith(("cuda", "cpu", "mps")):
        return f"say device={word}"
    for group in ("task", "hardware", "precision", "parallelism", "optimizer", "scheduler", "tracker"):
        if word.lower() in groups[group]:
            return f"say {'+' if group == 'hardware' else ''}{group}={word.lower()}"
    return fix_of_key(word) if "{}" not in FOREIGN_KEYS.get(word, "{}") else ""


def fix_of_command(
    words: Sequence[str], proper: Callable[[str, str], str], groups: Mapping[str, Collection[str]]
) -> str:
    """Return what to type instead of a line that begins with no command; nothing where nothing is known.

    proper  (key, value) -> "say key=value" for an option with dashes
    """
    first, *rest = words
    if first in FOREIGN_COMMANDS:
        return _say(FOREIGN_COMMANDS[first])
    if first in ("python", "python3", "torchrun", "accelerate", "-m", "accel-run", "runner"):
        left = [word for word in rest if word not in ("-m", "runner", "runner.cli", "accel-run", "launch", "run")]
        return f"say accel-run {' '.join(left[:1]) or 'train'}; several devices: parallelism=ddp"
    if first in ("--task", "--config-dir") or first.startswith(("--task=", "--config-dir=")):
        return f"a command comes first: accel-run train {' '.join(words)}"
    if first.startswith("-"):
        key, has_value, value = first.lstrip("-").partition("=")
        said = proper(key, value if has_value or not rest or rest[0].startswith("-") else rest[0])
    elif "=" in first:
        return f"a command comes first: accel-run train {first}"
    else:
        said = fix_of_word(first, groups)
    if said.startswith("say accel-run "):
        return said
    return f"a command comes first: accel-run train {said.removeprefix('say ')}" if said.startswith("say ") else ""


def _say(words: str) -> str:
    return words if words.startswith(("leave", "press")) else f"say {words}"
