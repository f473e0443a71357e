"""Set float64 as the default dtype of a process, so that results differ only by rounding errors."""

import torch

torch.set_default_dtype(torch.float64)
