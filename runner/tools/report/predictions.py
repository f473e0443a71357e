"""Pictures and texts that a run has predicted, fit for the page."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path

from runner.base.errors import StorageError
from runner.durable import files
from runner.durable.directory import INFERENCE_FILES
from runner.tools.report.page import Picture, PredictedFiles, Text
from runner.tools.report.run_data import RunData, fit, names_in


def predictions(story: RunData) -> PredictedFiles:
    """Return the pictures and texts that inference wrote, with a note on those that have no room."""
    pictures: list[Picture] = []
    texts: list[Text] = []
    left_out: list[str] = []
    room = _PICTURE_BYTES
    for folder in ("predictions", "plots"):
        if (story.path / folder).is_symlink():
            left_out.append(f"{folder}/ (a link, which is not followed)")
        for name in names_in(story.path / folder):
            path, shown = story.path / folder / name, fit(f"{folder}/{name}")
            if name.endswith(".png") and not _is_of_the_monitor(name):
                made = _picture(path, shown, room) if len(pictures) < _MOST_PICTURES else None
                room -= len(made.source) if made else 0
                pictures += [made] if made else []
                left_out += [] if made else [shown]
            elif name.endswith(".txt") and folder == "predictions" and not INFERENCE_FILES.fullmatch(name):
                text = _text(path, shown) if len(texts) < _MOST_TEXTS else None
                texts += [text] if text else []
                left_out += [] if text else [shown]
            elif folder == "predictions" and not INFERENCE_FILES.fullmatch(name):
                left_out.append(shown)
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    return PredictedFiles(pictures, texts, f"not shown here: {', '.join(left_out[:_NAMED])}{more}" if left_out else "")


def _is_of_the_monitor(name: str) -> bool:
    """Return whether it is a plot of the machine, which the report draws itself."""
    return re.fullmatch(r"(?:.*-)?(?:machine|gpus|gpu\d+)\.png", name) is not None


def _picture(path: Path, name: str, room: int) -> Picture | None:
    """Return the picture re-encoded as small as possible; None if it is not a picture, or there is no room for it."""
    from PIL import Image  # here: matplotlib's, and few pages have pictures

    try:
        content = files.read(path, at_most=_MOST_PICTURE_BYTES)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if math.prod(image.size) > _MOST_PIXELS:
                return None
            image.load()
            over = Image.new("RGBA", image.size, "white")
            over.alpha_composite(image.convert("RGBA"))
            over.thumbnail((_PICTURE_WIDTH, 4 * _PICTURE_WIDTH))
            buffer = io.BytesIO()
            over.convert("RGB").quantize(64).save(buffer, format="PNG", optimize=True)
    except Exception:  # a damaged file: Pillow raises what it likes
        return None
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Picture(name, source, *over.size) if len(source) <= room else None


def _text(path: Path, name: str) -> Text | None:
    try:
        content = files.read(path, at_most=_MOST_TEXT_BYTES).decode(errors="replace")
    except StorageError:
        return None
    more = "\n…" if len(content) > _TEXT_LETTERS else ""
    return Text(name, fit(content[:_TEXT_LETTERS]) + more)


_MOST_PICTURES, _MOST_TEXTS, _NAMED = 6, 6, 8
_PICTURE_BYTES = 190_000  # of all pictures, as encoded in the page
_PICTURE_WIDTH = 760  # pixels
_MOST_PIXELS = 40_000_000
_MOST_PICTURE_BYTES, _MOST_TEXT_BYTES, _TEXT_LETTERS = 16 << 20, 1 << 20, 1500
