"""Metrics of predicted keypoints: PCK, distance, correct end tokens; and the baseline of copying the support.

Source of PCK: Yang and Ramanan, Articulated Human Detection with Flexible Mixtures of Parts, PAMI 2013, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch, Episodes, copy_support
from .model import COORDINATE, END, KeypointPredictions

THRESHOLD = 0.2  # relative to the longer side of the object


def target_types(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the true types (N, T) of the T = K + 1 tokens of each query, and which of them count.

    Visible keypoints count, and so does the end token of a query with a visible keypoint; tokens after the end do not.
    """
    visible = batch["query_visible"]
    B, Q, K = visible.shape
    counts = batch["present"].sum(dim=1)[:, None].expand(B, Q).flatten()
    is_end = torch.arange(K + 1, device=visible.device) == counts[:, None]
    shown = visible.flatten(0, 1)
    counted = F.pad(shown, (0, 1)) | (is_end & shown.any(dim=1, keepdim=True))
    return torch.where(is_end, END, COORDINATE), counted


def score_keypoints(xy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return hits and distances (B, Q, K) of predicted keypoints (B, Q, K, 2), relative to the object's longer side.

    An invisible keypoint is not a hit, and its distance is 0.
    """
    distances = (xy - batch["query_xy"]).norm(dim=-1) / batch["query_size"][..., None]
    distances = torch.where(batch["query_visible"], distances, 0.0)
    return (distances <= THRESHOLD) & batch["query_visible"], distances


def score_predictions(predictions: KeypointPredictions, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return hits and distances (B, Q, K), and which queries (B, Q) end right after the last keypoint.

    A keypoint after the predicted end is not a hit.
    """
    hits, distances = score_keypoints(predictions.xy[:, -1, :-1].float().view_as(batch["query_xy"]), batch)
    is_end = (predictions.types[:, -1].argmax(dim=-1) == END).view(*hits.shape[:2], -1)
    goes_on = is_end.cumsum(dim=-1) == 0
    ended = goes_on.sum(dim=-1) == batch["present"].sum(dim=1)[:, None]
    return hits & goes_on[..., :-1], distances, ended


def copy_baseline(episodes: Episodes) -> Mapping[str, float]:
    """Return PCK and distance of copying the support's keypoints, over all episodes."""
    batch = episodes.places(range(len(episodes)))
    hits, distances = score_keypoints(copy_support(batch), batch)
    visible = batch["query_visible"].sum()
    return {"pck": float(hits.sum() / visible), "distance": float(distances.sum() / visible)}
