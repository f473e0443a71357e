"""Methods that other trainers call but accel-run does not, and what to use instead in a task."""

from __future__ import annotations

from collections.abc import Mapping

_HOOK = "write a hook: HOOKS = [MyHook]"
_BEFORE_STEP = "write a hook with before_step(parameters, objective): HOOKS = [MyHook]"
_METRICS = "define metrics(split) in the task"
_STEP = "remove it; for several optimizers or frequencies, write a task with OBJECTIVES"
_DATA = "move its code to the dataset, to training_step, or to the loss method of a task"
_BUILD = "move its code to build()"
_DATASET = "define dataset(split), or stream(split, shard, num_shards)"
_OPTIMIZER = "use optimizer=NAME and scheduler=NAME; add your own to OPTIMIZERS and SCHEDULERS in the task file"

# Methods of a LightningModule that no code of accel-run calls.
LIGHTNING_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("backward", "manual_backward", "optimizer_step", "optimizer_zero_grad"), _STEP),
    "lr_scheduler_step": "use scheduler=NAME; add your own to SCHEDULERS in the task file",
    **dict.fromkeys(("configure_gradient_clipping", "clip_gradients"), "use max_grad_norm=X"),
    **dict.fromkeys(("configure_model", "configure_sharded_model"), "use parallelism=fsdp"),
    **dict.fromkeys(
        ("on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_validation_epoch_start",
         "on_validation_start", "on_validation_end", "on_validation_batch_start", "on_validation_batch_end",
         "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad", "on_test_start",
         "on_test_end", "on_test_epoch_start", "on_test_batch_start", "on_test_batch_end", "on_test_model_eval",
         "on_test_model_train", "on_fit_end", "teardown", "configure_callbacks"),
        _HOOK,
    ),
    **dict.fromkeys(("on_after_backward", "on_before_optimizer_step"), _BEFORE_STEP),
    "on_before_backward": "move its code to the end of training_step, or of the loss method of a task",
    "on_before_zero_grad": "write a hook: before_step can read the gradients, and after_update the new weights",
    "on_train_batch_start": "define begin_update(progress) in the task",
    **dict.fromkeys(
        ("on_validation_epoch_end", "on_test_epoch_end", "validation_epoch_end", "training_epoch_end",
         "test_epoch_end", "training_step_end", "validation_step_end", "test_step_end"),
        _METRICS,
    ),
    **dict.fromkeys(("on_save_checkpoint", "on_load_checkpoint"), "store the state in a buffer (register_buffer)"),
    **dict.fromkeys(("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"), _DATA),
}  # fmt: skip

# Methods of a LightningModule, of transformers' Trainer and of common training loops that users may define in a Task.
FOREIGN_METHODS: Mapping[str, str] = {
    **LIGHTNING_UNSUPPORTED,
    **dict.fromkeys(("training_step", "train_step", "compute_loss"), "define loss(model, batch)"),
    **dict.fromkeys(
        ("validation_step", "val_step", "test_step", "eval_step", "evaluation_step"), "define evaluate(model, batch)"
    ),
    **dict.fromkeys(("predict_step", "prediction_step"), "define predict_batch(model, batch)"),
    **dict.fromkeys(("configure_optimizers", "create_optimizer", "create_optimizer_and_scheduler"), _OPTIMIZER),
    "create_scheduler": "use scheduler=NAME; add your own to SCHEDULERS in the task file",
    **dict.fromkeys(
        ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "get_train_dataloader",
         "get_eval_dataloader", "get_test_dataloader"),
        _DATASET,
    ),
    **dict.fromkeys(
        ("on_predict_start", "on_predict_end", "on_predict_batch_start", "on_predict_batch_end",
         "on_predict_epoch_start", "on_predict_epoch_end", "on_predict_model_eval"),
        "move its code to predict(model, generator, *, ...)",
    ),
    "get_train_sampler": "use sampler=NAME; add your own to SAMPLERS in the task file",
    "compute_metrics": _METRICS,
    **dict.fromkeys(("prepare_data", "setup"), _BUILD),
    **dict.fromkeys(("on_fit_start", "on_train_start"), "define begin_phase(phase) in the task"),
    "on_train_epoch_start": "define begin_update(progress) in the task",
}  # fmt: skip
