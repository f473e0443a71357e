"""What a message tells the reader to type, without the words around it."""

from __future__ import annotations

import re

SETTING = re.compile(r"""(?<![\w./-])[a-z][\w.]*=(?:\[[^\]]*\]|'[^']*'|"[^"]*"|[^\s,;:|'"?]+)""")


def suggested(text: str) -> list[str]:
    """Return the settings, key=value, that a message names, in order."""
    return SETTING.findall(text)
