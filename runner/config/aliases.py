"""Settings of other tools: suggest the equivalent setting of accel-run, without ever accepting them silently."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping

# Accepted aliases of the precision options.
PRECISION_NAMES = {
    "32": "fp32", "32-true": "fp32", "float32": "fp32", "full": "fp32",
    "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
    "bf16-mixed": "bf16", "bfloat16": "bf16",
}  # fmt: skip

_OWN_TASK = "define your model in a task file: accel-run new my_task.py, then --task ./my_task.py"
_RANKS = "parallelism=ddp parallelism.world_size={}"
_BATCH = "global_batch_size={} (samples per update) or micro_batch_size={} (samples per forward and backward pass)"
_ACCUMULATION = "global_batch_size=64 micro_batch_size=16, which accumulates the gradients of 64 / 16 = 4 micro-batches"
_RESUME = "accel-run resume, or resume NAME; for a new run that starts from another one: resume=NAME"
_TASK_SETTING = "it belongs to the task; use task.NAME=VALUE for a parameter of its build()"
PHASE_ADVICE = "phases=[NAME], where NAME is one of the task's phases, which accel-run plan lists"
_RENDEZVOUS_SETTING = "ranks on one machine find each other; for several machines, see docs/scale.md"

# Suggestion -> equivalent keys of other trainers; {} is replaced by the given value. Group names that are common in
# other trainers, such as trainer in trainer.max_epochs, are ignored.
_EQUIVALENTS: Mapping[str, str] = {
    "accel-run benchmark suite=ladder to compare settings, or backend=fast for cuDNN's search": "benchmark",
    _BATCH: "batch_size bs batchsize b"
    " batch bsz",
    "global_batch_size={}": "train_batch_size total_batch_size gbs",
    "micro_batch_size={}": "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu"
    " per_gpu_train_batch_size device_batch_size micro_bsz mbs",
    "micro_batch_size=auto": "auto_scale_batch_size auto_find_batch_size",
    _ACCUMULATION: "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum_steps"
    " grad_accum accum accum_steps accum_iter update_freq",
    "max_grad_norm={}": "clip_max_norm gradient_clip_val gradient_clip gradient_clipping grad_clip clip_grad "
    "clip_grad_norm max_norm clip grad_clip_norm grad_norm_clip gradient_clip_norm",
    "epochs={}": "max_epochs num_epochs num_train_epochs n_epochs epoch e nepochs"
    " max_epoch num_epoch total_epochs",
    "updates={}": "max_steps steps num_steps train_steps iterations iters max_iters num_iterations niter n_iters"
    " train_iters total_iters max_train_steps num_train_steps max_update max_updates total_updates num_updates",
    "updates=2": "debug fast_dev_run",
    "optimizer.lr={}": "lr learning_rate base_lr init_lr max_lr lr0",
    "optimizer.weight_decay={}": "weight_decay wd",
    "optimizer.eps={}": "eps adam_epsilon adam_eps epsilon opt_eps",
    "optimizer.betas=[{},0.999]": "beta1 adam_beta1",
    "optimizer.betas=[0.9,{}]": "beta2 adam_beta2",
    "optimizer.kernel=fused": "fused fused_adam fused_adamw",
    "optimizer.kernel=foreach": "foreach",
    "optimizer=sgd optimizer.momentum={}": "momentum",
    "optimizer=sgd optimizer.nesterov=true": "nesterov",
    "optimizer.betas={}": "betas",
    "optimizer={}": "optim opt optimizer.name optimizer.type optimizer.kind",
    "scheduler={}": "lr_scheduler lr_scheduler_type sched scheduler.name scheduler.type lr_schedule lr_decay_style",
    "scheduler.warmup={}": "warmup_steps num_warmup_steps warmup warmup_ratio warmup_epochs warmup_updates"
    " warmup_iters lr_warmup lr_warmup_steps lr_warmup_iters num_warmup_updates warmup_proportion",
    "scheduler.final_factor=0.1, a fraction of optimizer.lr": "min_lr eta_min lr_end end_lr lr_min",
    "scheduler.final_factor={}": "lrf min_lr_ratio min_lr_rate",
    "scheduler=step scheduler.every={}": "step_size lr_step_size lr_drop",
    "scheduler=step scheduler.gamma={}": "gamma lr_gamma lr_decay decay_rate",
    "averaging=ema": "ema use_ema model_ema",
    "averaging=ema averaging.decay={}": "ema_decay model_ema_decay",
    "adapter=lora": "lora use_lora peft use_peft",
    "adapter=lora adapter.rank={}": "lora_r lora_rank adapter.r",
    "adapter=lora adapter.alpha={}": "lora_alpha",
    "adapter=lora adapter.dropout={}": "lora_dropout",
    "adapter=lora adapter.target={}": "lora_target_modules target_modules",
    "adapter=lora adapter.train={}": "modules_to_save",
    "sharpness=sam": "sam use_sam asam",
    "sharpness=sam sharpness.rho={}": "rho sam_rho",
    "optimizer=schedulefree scheduler=constant": "schedule_free use_schedule_free",
    "averaging=swa": "swa swa_lr swa_lrs",
    "seed={}": "random_seed manual_seed rng_seed data_seed seed_everything",
    "device=cuda": "use_cuda cuda use_gpu",
    "device={}": "accelerator",
    "device=cuda:{}": "gpu gpu_id device_id",
    "device=cpu": "no_cuda cpu use_cpu",
    f"{_RANKS}, or device=cuda:0 for a single GPU": "devices gpus num_gpus ngpus n_gpus gpu_ids device_ids",
    _RANKS: "nproc_per_node world_size num_processes nprocs nproc",
    "launcher=slurm launcher.nodes={}, or torchrun: docs/scale.md": "num_nodes nnodes nodes num_machines",
    "launcher=slurm launcher.partition={}": "partition",
    "launcher=slurm launcher.time_min={}": "time time_limit",
    "parallelism={}": "strategy distributed_strategy",
    "parallelism=ddp": "multiprocessing_distributed distributed ddp data_parallel dp multi_gpu standalone",
    "parallelism=fsdp": "fsdp use_fsdp sharding_strategy fsdp_sharding_strategy"
    " zero_stage stage zero deepspeed use_deepspeed"
    " zero1 zero2 zero3 deepspeed_config ds_config fsdp_config",
    "parallelism=pipeline": "pp pp_size pipeline_parallel pipeline_model_parallel_size",
    "parallelism=ddp; accel-run or torchrun -m runner starts the ranks": "local_rank rank",
    "parallelism=ddp parallelism.batch_norm=sync": "sync_batchnorm sync_bn syncbn",
    "parallelism=ddp parallelism.timeout_s={}": "ddp_timeout dist_timeout nccl_timeout",
    "precision=bf16, or precision=fp16 if the GPU has no bfloat16": "use_amp amp autocast use_mixed_precision "
    "native_amp apex opt_level fp16_opt_level amp_opt_level",
    "precision={}": "mixed_precision dtype torch_dtype amp_dtype",
    "precision=fp16": "fp16 half",
    "precision=fp32": "no_use_amp no_amp fp32 float32",
    "precision=bf16": "bf16",
    "precision=tf32": "tf32 allow_tf32",
    "dataloader.num_workers={}": "num_workers workers dataloader_num_workers j",
    "dataloader.pin_memory={}": "pin_memory dataloader_pin_memory pin_mem",
    "dataloader.pin_memory=false": "no_pin_mem no_pin_memory",
    "dataloader.prefetch_factor={}": "prefetch_factor dataloader_prefetch_factor",
    "dataloader.drop_last={}": "drop_last dataloader_drop_last",
    "data.path={}": "data dataset data_dir data_path dataroot data_root train_data data.dir data.root"
    " train_dir train_path train_file",
    "data.train_samples={}": "max_train_samples num_train_samples",
    "evaluate.samples={}": "max_eval_samples num_eval_samples",
    "data.train_samples=320 (samples, not batches)": "limit_train_batches overfit_batches",
    "evaluate.samples=320 (samples, not batches)": "limit_test_batches limit_val_batches limit_eval_batches eval_iters",
    "task.size={}": "size model_size",
    f"task=NAME for a built-in task; {_OWN_TASK}": "model model_name arch network backbone net script"
    " model_name_or_path",
    "tracker.tags={}": "tags wandb_tags",
    "run={}": "name run_name exp_name experiment experiment_name run_id job_name "
    "wandb_run_name wandb_name",
    "output_root={}, and run=NAME for the folder in it": "checkpoint.dir checkpoint.path paths.output_dir "
    "output_dir save_dir log_dir logdir out_dir default_root_dir "
    "work_dir checkpoint_dir outdir"
    " logging_dir tensorboard_dir results_dir exp_dir save_path output_path save",
    "checkpoint.every={}": "checkpoint.interval checkpoint.every_n_steps checkpoint_interval save_every save_steps"
    " save_interval checkpoint_every save_freq every_n_train_steps"
    " checkpointing_steps ckpt_every ckpt_interval",
    "checkpoint.every=1epochs, or checkpoint.every=100 (updates)": "save_strategy",
    "checkpoint.keep={}": "save_total_limit save_top_k checkpoints_total_limit checkpoint_hist max_to_keep",
    "checkpoint.best={}": "metric_for_best_model eval_metric",
    "checkpoint.best=val/loss": "load_best_model_at_end save_best save_best_only",
    "checkpoint.best_is=max": "greater_is_better",
    "early_stopping.metric={}": "early_stopping.monitor",
    "early_stopping.best_is={}": "early_stopping.mode",
    "checkpoint=off": "no_save no_checkpoint disable_checkpointing",
    "evaluate.every={}": "eval_every eval_steps eval_interval val_every val_check_interval eval_freq "
    "val_interval validation_steps evaluate.interval evaluate.every_n_steps",
    "evaluate.every={}, or accel-run evaluate split=test for a trained run": "evaluate validate",
    "evaluate.every={}epochs": "check_val_every_n_epoch",
    "evaluate.every=1epochs, or evaluate.every=100 (updates)": "evaluation_strategy eval_strategy do_eval",
    "log_every=10, in updates": "logging_strategy",
    "log_every={}": "log_interval logging_steps log_every_n_steps print_freq log_freq",
    "early_stopping.patience={}": "patience early_stopping_patience early_stopping early_stop",
    "early_stopping.patience=5 to stop early; for your own callbacks, see docs/extensions.md": "callbacks callback",
    _RESUME: "checkpoint auto_resume resume_from resume_from_checkpoint ckpt_path load_checkpoint checkpoint_path"
    " ckpt load load_dir",
    "weights=FILE.safetensors; to convert a .pt file: accel-run import FILE": "pretrained init_from load_from"
    " weights_path load_weights load_model initial_checkpoint model_path",
    "memory=checkpoint": "use_checkpoint grad_checkpointing gradient_checkpointing activation_checkpointing"
    " checkpoint_activations grad_checkpoint"
    " recompute_activations use_gradient_checkpointing",
    "attention=flash": "flash_attention use_flash flash flash_attn use_flash_attention "
    "use_flash_attn use_flash_attention_2",
    "attention={}": "attn_implementation attn",
    "backend=deterministic": "deterministic cudnn_deterministic use_deterministic_algorithms",
    "backend=fast": "cudnn_benchmark cudnn.benchmark",
    "compile=default": "torch_compile use_compile torchcompile",
    "compile=default compile.backend={}": "torch_compile_backend dynamo_backend compile_backend",
    "compile={}": "torch_compile_mode compile_mode dynamo_mode",
    "memory.channels_last=true": "channels_last",
    "profiler=trace": "profile use_profiler",
    "profiler={}": "trainer.profiler",
    "tracker=wandb": "wandb use_wandb wandb_log log_wandb",
    "tracker=none": "no_wandb disable_wandb wandb_disabled no_log no_logger",
    "tracker={}": "logger report_to loggers",
    "tracker=wandb tracker.project={}": "wandb_project project wandb.project",
    "tracker=wandb tracker.entity={}": "wandb_entity entity wandb.entity",
    "tracker=wandb tracker.mode={}": "wandb_mode wandb.mode",
    "tracker=tensorboard": "tensorboard use_tensorboard",
    "--config-dir DIR, the folder of your configuration files": "config config_file config_path cfg_file c"
    " config_name cn cp",
    "resume=fresh": "no_resume overwrite overwrite_output_dir",
    PHASE_ADVICE: "phase",
    "ACCEL_RUN_LOG_LEVEL={} accel-run train": "log_level loglevel logging_level",
    "ACCEL_RUN_LOG_LEVEL=debug accel-run train": "verbose verbosity",
    "ACCEL_RUN_LOG_LEVEL=warning accel-run train": "quiet q silent disable_tqdm",
    "accel-run train": "do_train mode",
    "accel-run evaluate split=test": "eval evaluate_only eval_only test test_only do_test",
    "accel-run inference": "do_predict predict",
    "accel-run plan": "dry_run dryrun cfg info resolve print_config",
    "accel-run search 'optimizer.lr=log(1e-5,1e-2)'": "auto_lr_find lr_find find_lr",
    "accel-run status": "status",
    "accel-run search 'optimizer.lr=log(1e-5,1e-2)' trials={}": "n_trials trials",
    "accel-run search 'optimizer.lr=log(1e-5,1e-2)' goal={}": "direction goal",
    "accel-run monitor seconds=30, which does not train": "monitor_only",
    "accel-run train --help": "help h",
    "accel-run --version": "version v",
    "CUDA_VISIBLE_DEVICES={} accel-run train": "cuda_visible_devices",
    "OMP_NUM_THREADS={} accel-run train, or backend.threads={}": "omp_num_threads num_cpu_threads_per_process",
}  # fmt: skip
FOREIGN_KEYS: Mapping[str, str] = {key: suggestion for suggestion, keys in _EQUIVALENTS.items() for key in keys.split()}

# Reason -> keys of other trainers that have no equivalent.
_ABSENT_REASONS: Mapping[str, str] = {
    _TASK_SETTING: "label_smoothing dropout drop_path mixup cutmix img_size image_size input_size crop_size max_length "
    "max_seq_length block_size num_classes hidden_size num_layers augment shuffle group_by_length"
    " smoothing label_smoothing_factor freeze imgsz crop_pct drop_path_rate n_layer n_head n_embd num_heads"
    " patch_size vocab_size seq_len max_seq_len "
    "seq_length context_length",
    _RENDEZVOUS_SETTING: "dist_url master_port master_addr node_rank rdzv_backend rdzv_endpoint rdzv_id "
    "init_method machine_rank main_process_port main_process_ip",
    "the device selects the backend: NCCL for GPUs, gloo for the CPU": "dist_backend distributed_backend"
    " parallelism.backend",
    "unused parameters are always found": "ddp_find_unused_parameters find_unused_parameters",
    "weights, gradients and optimizer state stay on the device": "offload offload_optimizer offload_param"
    " cpu_offload fsdp_offload_params",
    "to divide a model, use parallelism=fsdp or parallelism=pipeline": "tp tp_size tensor_parallel "
    "tensor_model_parallel_size",
    "gradients are clipped by their norm": "gradient_clip_algorithm clip_mode",
    "an evaluation uses the batch size and the precision of training": "per_device_eval_batch_size test_batch_size "
    "eval_batch_size val_batch_size fp16_full_eval bf16_full_eval",
    "a schedule is as long as the phase (updates=N)": "t_max total_steps max_lr_steps lr_decay_iters lr_decay_steps",
    "the first module that produces a NaN is always named in the error": "detect_anomaly anomaly_detection",
    "the number formats are fp32, tf32, bf16 and fp16": "fp8 int8 load_in_8bit load_in_4bit",
    "a checkpoint contains the number of the next update": "start_epoch start_step initial_epoch ignore_data_skip",
    "checkpoints are always written as safetensors": "save_safetensors save_only_model",
    "checkpoints are saved by default": "save_model enable_checkpointing",
    "the progress bar is shown on terminals only": "enable_progress_bar",
    "each strategy divides the samples of an update among the ranks": "use_distributed_sampler",
    "the loss is always divided by the number of items of all ranks": "average_tokens_across_devices",
    "the length of a run is set by updates or epochs": "min_epochs min_steps max_time",
    "data is sent only to the tracker": "push_to_hub hub_model_id hub_token",
    "workers are always persistent": "persistent_workers dataloader_persistent_workers",
    "accel-run plan lists all settings": "num_sanity_val_steps reload_dataloaders_every_n_epochs "
    "barebones plugins",
}  # fmt: skip
ABSENT: Mapping[str, str] = {key: reason for reason, keys in _ABSENT_REASONS.items() for key in keys.split()}
# Option of a group -> what other tools call it; true and numbers are common mistakes for groups.
_OPTION_NAMES: Mapping[str, str] = {
    "adapter=lora": "adapter=true adapter=peft",
    "attention=auto": "attention=sdpa attention=true",
    "attention=flash": "attention=flash_attention_2 attention=flash_attn",
    "attention=math": "attention=eager",
    "averaging=ema": "averaging=true",
    "checkpoint=default": "checkpoint=true",
    "compile=default": "compile=true compile=inductor",
    "memory=checkpoint": "memory=true",
    "optimizer=adamw": "optimizer=adamw_torch optimizer=adamw_torch_fused optimizer=adamw_hf optimizer=fusedadam",
    "optimizer=adamw8bit": "optimizer=adamw_bnb_8bit optimizer=paged_adamw_8bit optimizer=paged_adamw",
    "parallelism=ddp": "parallelism=true parallelism=dp parallelism=ddp_spawn parallelism=distributed",
    "parallelism=fsdp": "parallelism=deepspeed parallelism=zero parallelism=fsdp2 parallelism=full_shard",
    "precision=bf16": "precision=amp precision=true",
    "profiler=trace": "profiler=true profiler=simple profiler=pytorch profiler=advanced",
    "scheduler=constant": "scheduler=none scheduler=null scheduler=false scheduler=off scheduler=constantlr"
    " scheduler=constant_with_warmup",
    "scheduler=cosine": "scheduler=cosineannealinglr scheduler=cosine_with_warmup scheduler=cosine_warmup"
    " scheduler=cosine_annealing",
    "scheduler=linear": "scheduler=linear_with_warmup scheduler=linear_warmup scheduler=linearlr",
    "scheduler=multistep": "scheduler=multisteplr",
    "scheduler=one_cycle": "scheduler=onecyclelr",
    "scheduler=plateau": "scheduler=reducelronplateau scheduler=reduce_lr_on_plateau",
    "scheduler=polynomial": "scheduler=poly scheduler=polynomiallr",
    "scheduler=step": "scheduler=steplr",
    "scheduler=warm_restarts": "scheduler=cosine_with_restarts scheduler=cosineannealingwarmrestarts",
    "scheduler=wsd": "scheduler=warmup_stable_decay",
    "sharpness=sam": "sharpness=true",
    "tracker=wandb": "tracker=true",
}
_FOREIGN_OPTIONS = {name: option for option, names in _OPTION_NAMES.items() for name in names.split()}
# Group -> setting that a number for the group probably means.
_GROUP_NUMBERS: Mapping[str, str] = {"checkpoint": "checkpoint.every={}", "parallelism": _RANKS}
_WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_LOADING_KEYS = (
    "checkpoint load load_from load_model load_weights init_from initial_checkpoint pretrained model_path weights_path"
)
# Group names of other trainers that carry no meaning.
_CONTAINERS = (
    "task trainer training train model module args hparams params cfg config opts options data datamodule dataset"
    " dataloader"
    " loader optim optimizer scheduler lr_scheduler wandb logger logging checkpoint ckpt evaluate eval parallelism"
    " adapter memory precision hf lightning deepspeed dist distributed"
)


def suggestion_for_key(key: str, value: str = "") -> str:
    """Return a suggestion for a key of another tool and its value; empty if unknown."""
    name = key.lower().replace("-", "_")
    if name in _LOADING_KEYS.split() and value.endswith(_WEIGHT_FILES):
        return suggestion_for_argument(value, {})
    group, _, inner = name.partition(".")
    for candidate in (name, inner if group in _CONTAINERS.split() else ""):
        if candidate in ABSENT and group != "task":  # of a parameter of the task, only the caller knows the right name
            return f"there is no such setting: {ABSENT[candidate]}"
        if candidate in FOREIGN_KEYS:
            suggestion = FOREIGN_KEYS[candidate]
            if "{}" not in suggestion and value.lower() in ("false", "no", "off", "0", "null", "none"):
                return "leave it out"
            return f"use {suggestion.replace('{}', value or '...')}"
    return ""


def suggestion_for_option(group: str, option: str) -> str:
    """Return the setting that another tool's option of a group means, such as scheduler=cosine; empty if unknown."""
    if option.isdecimal() and int(option) and group in _GROUP_NUMBERS:
        return _GROUP_NUMBERS[group].format(option)
    lowered = "true" if option == "on" else option.lower()  # the canonical name of true
    return _FOREIGN_OPTIONS.get(f"{group}={lowered}", "")


def suggestion_for_argument(argument: str, groups: Mapping[str, Collection[str]]) -> str:
    """Return a suggestion for a lone argument: the option of a group, a device, a file; empty if unknown.

    groups  group -> its options
    """
    if argument.endswith(".py"):
        return f"use --task {shlex.quote(argument)}"
    if argument.endswith((".yaml", ".yml")):
        return "use --config-dir DIR, the folder that holds the file, and GROUP=NAME for the file in it"
    if argument.endswith(".safetensors"):
        return f"use {shlex.quote(f'weights={argument}')}"
    if argument.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return f"use accel-run import {shlex.quote(argument)}, then weights=FILE.safetensors"
    if argument.startswith(("cuda", "cpu", "mps", "xpu")):
        return f"use device={argument}"
    for group in ("task", "hardware", "precision", "parallelism", "optimizer", "scheduler", "tracker"):
        if argument.lower() in groups[group]:
            return f"use {'+' if group == 'hardware' else ''}{group}={argument.lower()}"
    return ""
