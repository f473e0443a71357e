"""Read the predicted pictures and texts of a run, reduced for the page."""

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
from runner.tools.report.run_data import RunData, make_printable, names_in


def read_predictions(run: RunData) -> PredictedFiles:
    """Return the pictures and texts that inference wrote, with a note on omitted ones."""
    pictures: list[Picture] = []
    texts: list[Text] = []
    left_out: list[str] = []
    room = _PICTURE_BYTES
    for folder in ("predictions", "plots"):
        if (run.path / folder).is_symlink():
            left_out.append(f"{folder}/ (a link, which is not followed)")
        for name in names_in(run.path / folder):
            path, label = run.path / folder / name, make_printable(f"{folder}/{name}")
            if name.endswith(".png") and not _MACHINE_PLOT.fullmatch(name):
                picture = _read_picture(path, label, room) if len(pictures) < _MAX_PICTURES else None
                room -= len(picture.source) if picture else 0
                pictures += [picture] if picture else []
                left_out += [] if picture else [label]
            elif name.endswith(".txt") and folder == "predictions" and not INFERENCE_FILES.fullmatch(name):
                text = _read_text(path, label) if len(texts) < _MAX_TEXTS else None
                texts += [text] if text else []
                left_out += [] if text else [label]
            elif folder == "predictions" and not INFERENCE_FILES.fullmatch(name):
                left_out.append(label)
    more = f" and {len(left_out) - _MAX_LISTED} more" if len(left_out) > _MAX_LISTED else ""
    note = f"not shown here: {', '.join(left_out[:_MAX_LISTED])}{more}" if left_out else ""
    return PredictedFiles(pictures, texts, note)


def _read_picture(path: Path, name: str, room: int) -> Picture | None:
    """Return the picture with reduced size and colors; None if it cannot be read, or is too large for the page."""
    from PIL import Image  # slow to import, and few pages have pictures

    try:
        content = files.read(path, at_most=_MAX_PICTURE_FILE_BYTES)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if math.prod(image.size) > _MAX_PIXELS:
                return None
            image.load()
            canvas = Image.new("RGBA", image.size, "white")
            canvas.alpha_composite(image.convert("RGBA"))
            canvas.thumbnail((_PICTURE_WIDTH, 4 * _PICTURE_WIDTH))
            buffer = io.BytesIO()
            canvas.convert("RGB").quantize(64).save(buffer, format="PNG", optimize=True)
    except Exception:  # Pillow raises various exceptions for damaged files
        return None
    source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return Picture(name, source, *canvas.size) if len(source) <= room else None


def _read_text(path: Path, name: str) -> Text | None:
    try:
        content = files.read(path, at_most=_MAX_TEXT_FILE_BYTES).decode(errors="replace")
    except StorageError:
        return None
    more = "\n…" if len(content) > _TEXT_LETTERS else ""
    return Text(name, make_printable(content[:_TEXT_LETTERS]) + more)


_MAX_PICTURES, _MAX_TEXTS, _MAX_LISTED = 6, 6, 8
_MACHINE_PLOT = re.compile(r"(?:.*-)?(?:machine|gpus|gpu\d+)\.png")  # plots of the monitor; the report draws its own
_PICTURE_BYTES = 190_000  # total of all encoded pictures on the page
_PICTURE_WIDTH = 760  # pixels
_MAX_PIXELS = 40_000_000
_MAX_PICTURE_FILE_BYTES, _MAX_TEXT_FILE_BYTES, _TEXT_LETTERS = 16 << 20, 1 << 20, 1500
