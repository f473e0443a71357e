"""tests/projects/speech_ctc.py with the Hugging Face Trainer, which draws batches of utterances of similar length."""

import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import get_last_checkpoint


class Speech(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        frames, lengths, texts, sizes = (inputs[name] for name in ("frames", "lengths", "texts", "sizes"))
        scores = model(frames, lengths).transpose(0, 1)
        total = F.ctc_loss(scores, texts, lengths, sizes, reduction="sum", zero_infinity=True)
        loss = total / len(lengths)  # reduction="mean" also divides by the lengths of the texts
        return (loss, {"scores": scores}) if return_outputs else loss

    def _get_train_sampler(self, train_dataset=None):
        return LengthGroupedSampler(self.args.train_batch_size, lengths=self.train_dataset.lengths)


def fit(task, folder):
    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=6,
        max_grad_norm=5.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        logging_steps=1,
        remove_unused_columns=False,
        label_names=["texts"],
    )
    decayed = [weight for weight in task.model.parameters() if weight.dim() > 1]
    others = [weight for weight in task.model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.005, betas=(0.9, 0.95))
    names = ("frames", "lengths", "texts", "sizes")
    trainer = Speech(
        task.model,
        arguments,
        data_collator=lambda samples: dict(zip(names, task.collate(samples), strict=True)),
        train_dataset=task.dataset("train"),
        eval_dataset=task.dataset("val"),
        optimizers=(
            optimizer,
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, 5, pct_start=0.4, cycle_momentum=False),
        ),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer
