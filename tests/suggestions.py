"""The settings that a message suggests, without its wording."""

from __future__ import annotations

import re

SETTING = re.compile(r"""(?<![\w./-])[a-z][\w.]*=(?:\[[^\]]*\]|'[^']*'|"[^"]*"|[^\s,;:|'"?]+)""")


def suggested(text: str) -> list[str]:
    """Return the settings (key=value) in a message, in order."""
    return SETTING.findall(text)
