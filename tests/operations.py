"""Count the operators that torch runs, as a measure of cost that needs no clock."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Records the names of operators in call order, including those of backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*given, **(named or {}))
