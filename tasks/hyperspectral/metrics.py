"""Detection metrics: IoU and F1 over all pixels with the threshold at logit 0, and AUROC per cube."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.base.task import Sum

UNKNOWN = 255  # in a mask: excluded from loss and metrics


def detection(logits: Tensor, mask: Tensor) -> dict[str, Sum]:
    """Return IoU, F1 and AUROC of logits (B, H, W) against masks (B, H, W) of 0, 1 and UNKNOWN, as sums and counts.

    IoU = TP / (TP + FP + FN) and F1 = 2 TP / (2 TP + FP + FN) are computed from counts over the pixels of all cubes.
    AUROC compares pixels within a cube, and is averaged over the cubes that contain both target and background pixels.
    Comparing the pixels of all cubes would require all scores at once.
    """
    found, target, known = logits > 0, mask == 1, mask != UNKNOWN
    hits = (found & target).sum()
    wrong = ((found ^ target) & known).sum()
    areas, both = auroc(logits.flatten(1), mask.flatten(1))
    return {
        "iou": (hits, hits + wrong),
        "f1": (2 * hits, 2 * hits + wrong),
        "auroc": (torch.where(both, areas, 0.0).sum(), both.sum()),
    }


def auroc(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """From scores and masks (B, N), return the area under the ROC curve of each row (B,), and where it is defined (B,).

    The area is the fraction of correctly ordered pairs of a target and a background pixel; ties count half
    (Mann-Whitney).
    """
    target, background = mask == 1, mask == 0
    scores = scores.float().masked_fill(~(target | background), torch.inf)
    ordered = scores.sort(dim=1).values
    below = torch.searchsorted(ordered, scores, side="left")
    up_to = torch.searchsorted(ordered, scores, side="right")
    ranks = (below + up_to + 1).double() / 2
    positives, negatives = target.sum(1).double(), background.sum(1).double()
    pairs = (ranks * target).sum(1) - positives * (positives + 1) / 2
    return pairs / (positives * negatives).clamp(min=1.0), (positives > 0) & (negatives > 0)
