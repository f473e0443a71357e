"""Train a Hugging Face transformers model on a folder of datasets, as its Trainer does, but with exact loss sums."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.base.errors import InputMissing, TaskFault
from runner.base.packages import require
from runner.base.task import Dataset, Gather, Sum, Task

IGNORED = -100  # label of positions without loss, as in torch and transformers
_LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions")
# argument of Trainer -> what to use instead
UNSUPPORTED: Mapping[str, str] = {
    "args": "see docs/coming-from.md for the settings that correspond to TrainingArguments",
    "data_collator": "pass it as collator=...",
    "train_dataset": 'pass data={"train": ..., "validation": ...}',
    "eval_dataset": 'pass data={"train": ..., "validation": ...}',
    "processing_class": "pass collator=DataCollatorWithPadding(tokenizer)",
    "tokenizer": "pass collator=DataCollatorWithPadding(tokenizer)",
    "model_init": "create the model in build()",
    "compute_loss_func": "pass loss=f with f(outputs, batch) -> (sum over the items, number of items)",
    "callbacks": "write a hook: HOOKS = [MyHook]",
    "optimizers": "use optimizer=NAME and scheduler=NAME; add your own to OPTIMIZERS and SCHEDULERS in the task file",
    "optimizer_cls_and_kwargs": "use optimizer=NAME; add your own to OPTIMIZERS in the task file",
    "preprocess_logits_for_metrics": "define evaluate(model, batch) in a subclass of TransformersTask",
}
_SPLITS = {"train": ("train",), "val": ("validation", "val", "dev"), "test": ("test",)}


class TransformersTask(Task):
    """A task that trains a transformers model.

    The loss is computed from the logits as a sum over the labels that count, so that padding and unequal micro-batches
    do not change its weight; Trainer's mean over a micro-batch is not used.

    Args:
        model: a PreTrainedModel with a head.
        data: a folder that `save_to_disk` wrote, or a DatasetDict, or a mapping of splits to datasets.
        collator: samples -> batch, such as DataCollatorWithPadding(tokenizer); default: default_data_collator.
        loss: (outputs, batch) -> (sum over the items, number of items), for heads for which this module has no loss.
        compute_metrics: as for Trainer, receives a transformers.EvalPrediction of all samples, which can be unpacked
            into predictions and labels, and returns {name: number}, reported as val/metrics.NAME. Predictions of all
            batches must have the same shape.

    For sequence classification and regression, `predict_batch` returns the logits, as Trainer.predict does, and the
    predicted classes.

    Raises InputMissing if the folder does not exist, TaskFault for a head for which neither the caller nor this module
    has a loss, and for other arguments of Trainer.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Path | str | Mapping[str, Any],
        *,
        collator: Callable[[Sequence[Any]], Mapping[str, Tensor]] | None = None,
        loss: Callable[[Any, Mapping[str, Tensor]], Sum] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
        **unsupported: Any,
    ) -> None:
        for name in unsupported:
            fix = UNSUPPORTED.get(name, "remove it")
            raise TaskFault(f"{name} is not an argument of TransformersTask", fix=fix)
        self.model = model
        self.data = data if isinstance(data, Mapping) else _load_data(Path(data))
        self.splits = tuple(self.data)
        self.loss_function = loss or select_loss(model)
        self.compute_metrics = compute_metrics
        self._collate = collator or require("transformers", "transformers").default_data_collator
        self._inputs = set(inspect.signature(model.forward).parameters) | set(_LABELS)
        self._is_seq2seq = bool(getattr(model.config, "is_encoder_decoder", False))
        self._is_sequence_head = _head_type(model) == "ForSequenceClassification"
        self.item = "token" if _head_type(model) in _TOKEN_HEADS else "sample"

    def dataset(self, split: str) -> Dataset:
        name = next((name for name in _SPLITS.get(split, (split,)) if name in self.data), None)
        if name is None:
            raise NotImplementedError(f"the data has no split for {split}; it has {', '.join(self.data)}")
        dataset = self.data[name]
        columns = () if _has_transform(dataset) else getattr(dataset, "column_names", ())
        unused = [column for column in columns if column not in self._inputs]
        kept: Dataset = dataset.remove_columns(unused) if unused else dataset
        return kept

    def collate(self, samples: Sequence[Any]) -> Mapping[str, Tensor]:
        return dict(self._collate(samples))

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sum:
        return self.loss_function(self._outputs(model, batch), batch)

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        outputs = self._outputs(model, batch)
        returned: dict[str, Any] = {"loss": self.loss_function(outputs, batch)}
        if self.compute_metrics is not None:
            returned["metrics"] = outputs.logits.float(), batch["labels"]
        return returned

    def metrics(self, split: str) -> Mapping[str, Any]:
        compute = self.compute_metrics
        if compute is None:
            return {}
        prediction = require("transformers", "transformers").EvalPrediction
        return {
            "metrics": Gather(lambda logits, labels: compute(prediction(logits.cpu().numpy(), labels.cpu().numpy())))
        }

    def predict_batch(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:  # type: ignore[override]
        logits = self._outputs(model, batch).logits.float()
        kind, labels = _problem_type(self.model), batch.get("labels")
        if kind == "regression":
            return {"prediction": logits.squeeze(-1) if logits.shape[-1] == 1 else logits}
        has_many = kind == "multi_label_classification"
        if kind is None and labels is not None:  # as for the loss
            has_many = labels.is_floating_point()
        return {"label": (logits > 0).long() if has_many else logits.argmax(-1), "logits": logits}

    @property
    def predicts(self) -> Literal["predict", "predict_batch", ""]:
        is_default = type(self).predict_batch is TransformersTask.predict_batch
        method = super().predicts
        return "" if method == "predict_batch" and is_default and not self._is_sequence_head else method

    def _outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        """Call the model; with labels only if they are also the inputs of a decoder."""
        kept = {"labels"} if self._is_seq2seq else set()
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name in kept or name not in _LABELS}
        if "use_cache" in self._inputs:  # a recomputed block would add its keys to the cache twice
            inputs["use_cache"] = False
        return model(**inputs)


def select_loss(model: nn.Module) -> Callable[[Any, Mapping[str, Tensor]], Sum]:
    """Return the loss of a head as a sum. Raises TaskFault for an unknown head."""
    kind = _head_type(model)
    if kind == "ForSequenceClassification":
        return _SEQUENCE_LOSSES[_problem_type(model)]
    if kind not in _LOSSES:
        known = ", ".join(["ForSequenceClassification", *_LOSSES])
        what = f"no loss is known for the head {kind} of {type(model).__name__}; supported heads: {known}"
        raise TaskFault(what, fix="pass loss=f with f(outputs, batch) -> (sum over the items, number of items)")
    return _LOSSES[kind]


def _head_type(model: nn.Module) -> str:
    """Return the name of the head; older ones for causal language models have no loss_type."""
    name = type(model).__name__
    return str(getattr(model, "loss_type", None) or ("ForCausalLM" if name.endswith("LMHeadModel") else name))


def _problem_type(model: nn.Module) -> str | None:
    """Return the kind of labels of a sequence classifier; None: it depends on their dtype, as in transformers."""
    config: Any = model.config
    if config.problem_type:
        return str(config.problem_type)
    return "regression" if config.num_labels == 1 else None


def _has_transform(dataset: Any) -> bool:
    """Return whether a dataset of the library `datasets` computes its samples with a function (`with_transform`)."""
    form = getattr(dataset, "format", None)
    return isinstance(form, Mapping) and form.get("type") == "custom"


def _load_data(folder: Path) -> Mapping[str, Any]:
    if not folder.is_dir():
        raise InputMissing(f"{folder} is not a folder", where="data.path", fix="use a folder that save_to_disk wrote")
    loaded: Any = require("datasets", "transformers").load_from_disk(str(folder))
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _cross_entropy(logits: Tensor, labels: Tensor) -> Sum:
    # In float32. On a GPU, this makes no float32 copy of float16 logits, unlike F.cross_entropy(logits.float()).
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1, dtype=torch.float32)
    total = F.nll_loss(log_probabilities, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


def _next_token_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    return _cross_entropy(outputs.logits[:, :-1], batch["labels"][:, 1:])


def _token_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    return _cross_entropy(outputs.logits, batch["labels"])


def _span_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    ends = ((outputs.start_logits, batch["start_positions"]), (outputs.end_logits, batch["end_positions"]))
    losses = [F.cross_entropy(logits.float(), place, reduction="sum") for logits, place in ends]
    return (losses[0] + losses[1]) / 2, len(batch["start_positions"])


def _regression_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    difference = outputs.logits.float().flatten() - batch["labels"].float().flatten()
    return difference.square().sum(), difference.numel()


def _multi_label_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    labels = batch["labels"].float()
    return F.binary_cross_entropy_with_logits(outputs.logits.float(), labels, reduction="sum"), labels.numel()


def _classification_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Sum:
    return (_multi_label_loss if batch["labels"].is_floating_point() else _token_loss)(outputs, batch)


_TOKEN_HEADS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
_LOSSES: Mapping[str, Callable[[Any, Mapping[str, Tensor]], Sum]] = {
    "ForCausalLM": _next_token_loss,
    "ForMaskedLM": _token_loss,
    "ForTokenClassification": _token_loss,
    "ForConditionalGeneration": _token_loss,
    "ForQuestionAnswering": _span_loss,
}
_SEQUENCE_LOSSES: Mapping[str | None, Callable[[Any, Mapping[str, Tensor]], Sum]] = {
    None: _classification_loss,
    "single_label_classification": _token_loss,
    "multi_label_classification": _multi_label_loss,
    "regression": _regression_loss,
}
