"""Output of inference: keypoints in the COCO results format, PCK per category, and plots of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.base.picture import encode_png, new_figure

from .data import Batch, Category, Episodes
from .metrics import THRESHOLD

TRUE, HIT, MISS = "#2e9e5b", "#1f6fd1", "#d1342f"


def coco_results(episodes: Episodes, objects: Sequence[int], xy: Tensor, scores: Tensor) -> list[dict[str, Any]]:
    """Return a row of COCO results for each query of an episode, in pixels of its image.

    objects     indices of the queries in the annotations of the set
    xy, scores  (Q, K, 2) relative to the crop, (Q, K): probability that the keypoint exists
    """
    rows = []
    for position, places, sure in zip(objects, xy.tolist(), scores.tolist(), strict=True):
        annotation = episodes.poses.annotations[position]
        left, top, side = annotation.square(episodes.crop)
        count = annotation.category.num_keypoints
        triples = [
            (round(left + x * side, 2), round(top + y * side, 2), round(score, 4))
            for (x, y), score in zip(places[:count], sure[:count], strict=True)
        ]
        rows.append(
            {
                "image_id": annotation.image_id,
                "category_id": annotation.category.id,
                "keypoints": [value for triple in triples for value in triple],
                "score": round(sum(sure[:count]) / count, 4),
            }
        )
    return rows


def category_table(counts: Mapping[str, Sequence[float]]) -> str:
    """Return a line per category, the worst first: PCK of the model and of the baseline, and the number of keypoints.

    The baseline copies the keypoints of the support.

    counts  name -> hits of the model, hits of the baseline, visible keypoints
    """
    rows = sorted(counts.items(), key=lambda row: row[1][0] / max(1.0, row[1][2]))
    total = [sum(column) for column in zip(*counts.values(), strict=True)]
    lines = [f"PCK@{THRESHOLD:g} in %   model  copying  keypoints"]
    for name, (found, copied, seen) in [*rows, ("all", total)]:
        shares = (100 * found / max(1.0, seen), 100 * copied / max(1.0, seen))
        lines.append(f"{name:<14}{shares[0]:8.1f} {shares[1]:8.1f} {seen:10.0f}")
    return "\n".join(lines) + "\n"


def episode_picture(batch: Batch, row: int, xy: Tensor, hits: Tensor, category: Category) -> bytes:
    """Return a PNG: the support with its keypoints, and each query with the true and the predicted ones.

    xy, hits  (Q, K, 2) and (Q, K) of this episode
    """
    queries = xy.shape[0]
    figure = new_figure(width=3.1 * (1 + queries), height=3.9)
    axes = figure.subplots(1, 1 + queries)
    found, seen = int(hits.sum()), int(batch["query_visible"][row].sum())
    figure.suptitle(
        f"Category {category.name}: {found} of {seen} keypoints within {THRESHOLD:g} x the longer side of the object"
    )
    shown = batch["support_visible"][row]
    _show(axes[0], batch["support_image"][row], "Support, as given")
    _draw_skeleton(axes[0], batch["support_xy"][row], shown, category, TRUE)
    _points(axes[0], batch["support_xy"][row], shown, TRUE, label=None)
    for number in range(queries):
        axis, true, visible = axes[1 + number], batch["query_xy"][row, number], batch["query_visible"][row, number]
        predicted, hit = xy[number], hits[number]
        _show(axis, batch["query_image"][row, number], f"Query {number + 1}: {int(hit.sum())} of {int(visible.sum())}")
        _draw_skeleton(axis, predicted, batch["present"][row], category, HIT)
        for point in visible.nonzero().flatten().tolist():
            ends = [[float(predicted[point, side]), float(true[point, side])] for side in (0, 1)]
            axis.plot(*ends, color="white", linewidth=0.9, alpha=0.9)
        first = number == 0
        _draw_true_keypoints(axis, true, visible, label="true" if first else None)
        _points(axis, predicted, hit, HIT, label="predicted, within tolerance" if first else None)
        _points(axis, predicted, visible & ~hit, MISS, label="predicted, too far" if first else None)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return encode_png(figure)


def _show(axis: Any, image: Tensor, title: str) -> None:
    axis.imshow(image.permute(1, 2, 0).numpy(), extent=(0, 1, 1, 0), interpolation="nearest")
    axis.set_title(title, fontsize=10)
    axis.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[])


def _draw_skeleton(axis: Any, xy: Tensor, shown: Tensor, category: Category, color: str) -> None:
    for start, end in category.skeleton:
        if shown[start] and shown[end]:
            ends = xy[[start, end]].T.tolist()
            axis.plot(*ends, color=color, linewidth=1.6, alpha=0.75, solid_capstyle="round")


def _points(axis: Any, xy: Tensor, shown: Tensor, color: str, *, label: str | None) -> None:
    x, y = xy[shown].T.tolist() if shown.any() else ([], [])
    axis.scatter(x, y, s=52, color=color, edgecolors="white", linewidths=0.8, zorder=3, label=label)
    for number in shown.nonzero().flatten().tolist():
        place = (float(xy[number, 0]), float(xy[number, 1]))
        axis.annotate(str(number + 1), place, fontsize=6, color="white", ha="center", va="center_baseline", zorder=4)


def _draw_true_keypoints(axis: Any, xy: Tensor, shown: Tensor, *, label: str | None) -> None:
    x, y = xy[shown].T.tolist() if shown.any() else ([], [])
    axis.scatter(x, y, s=90, facecolors="none", edgecolors=TRUE, linewidths=1.6, zorder=2, label=label)
