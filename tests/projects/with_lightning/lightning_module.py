"""tests/projects/lightning_module.py with Lightning, for which it was written."""

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint


def fit(task, folder):
    module = type(task.module)()
    module.net = task.module.net  # starts with the initial weights
    best = ModelCheckpoint(folder, monitor="val_error", save_last=True)
    trainer = lightning.Trainer(max_steps=5, callbacks=[best], default_root_dir=folder)
    trainer.fit(module, ckpt_path="last")
    return trainer
