"""Report methods that other frameworks call and this one does not, in the classes of a task file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.base.errors import Problem

_HOOK = "a hook: HOOKS = [MyHook], with {} in the class"
# method -> what to define or set here
FOREIGN_METHODS: Mapping[str, str] = {
    "training_step": "define loss(model, batch) -> (loss summed over the items, their number)",
    "validation_step": "define evaluate(model, batch) -> {name: (sum, count)}",
    "test_step": "define evaluate(model, batch); run it with accel-run evaluate split=test",
    "predict_step": "define predict(model, generator) -> Prediction",
    "configure_optimizers": "use optimizer=NAME scheduler=NAME, or OPTIMIZERS and SCHEDULERS for your own",
    "optimizer_step": "use max_grad_norm=X, or OPTIMIZERS for your own optimizer",
    "lr_scheduler_step": "use scheduler=NAME, or SCHEDULERS for your own",
    "configure_callbacks": _HOOK.format("its methods"),
    "train_dataloader": 'return the samples from dataset("train")',
    "val_dataloader": 'return the samples from dataset("val")',
    "test_dataloader": 'return the samples from dataset("test")',
    "predict_dataloader": "read the samples in predict(model, generator)",
    "get_train_dataloader": 'return the samples from dataset("train")',
    "get_eval_dataloader": 'return the samples from dataset("val")',
    "create_optimizer": "use optimizer=NAME, or OPTIMIZERS for your own",
    "create_scheduler": "use scheduler=NAME, or SCHEDULERS for your own",
    "on_fit_start": _HOOK.format("begin"),
    "on_train_start": _HOOK.format("begin"),
    "on_train_end": _HOOK.format("end"),
    "on_train_batch_start": "define begin_update(progress)",
    "on_train_batch_end": _HOOK.format("after_update"),
    "on_train_epoch_start": "define begin_update(progress), which has the epoch",
    "on_train_epoch_end": _HOOK.format("after_update or after_evaluation"),
    "training_epoch_end": "return further metrics as the third value of loss",
    "on_validation_epoch_end": "define metrics(split), or summarize(metrics)",
    "validation_epoch_end": "define metrics(split), or summarize(metrics)",
}


def find_foreign_methods(tree: ast.Module, source: Path) -> Iterator[Problem]:
    """Yield a problem for each such method of a class that derives from Task, unless the file itself uses it."""
    found = [
        (node, member)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(_is_task(base) for base in node.bases)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name in FOREIGN_METHODS
    ]
    used_names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} if found else set()
    for node, member in found:
        if member.name not in used_names:
            what = f"{node.name}.{member.name} is a method of another framework, and is never called here"
            yield Problem(what, f"{source}:{member.lineno}", FOREIGN_METHODS[member.name])


def _is_task(base: ast.expr) -> bool:
    return ast.unparse(base) in ("Task", "runner.Task")
