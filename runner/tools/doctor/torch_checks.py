"""The checks that need torch. They load their modules when they run, because torch itself may be what is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from runner.config.request import Request
from runner.tools.doctor.findings import CheckContext, CheckResult

if TYPE_CHECKING:
    from runner.plan.inventory import Inventory
    from runner.tools.doctor.contact_checks import RunPrediction


def matmul(context: CheckContext) -> Iterator[CheckResult]:
    """Matrix multiplication per device and format: accuracy against float64."""
    from runner.tools.doctor import arithmetic

    return arithmetic.matmul(context)


def attention(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels on the shapes of GPT-2, with torch's reason if one does not run."""
    from runner.tools.doctor import kernels

    return kernels.attention(context)


# ---------------------------------------------------------------- first contact


def formats(context: CheckContext) -> Iterator[CheckResult]:
    """Formats: exactly those that the rules call native are faster than float32."""
    yield from _contact_checks().formats(context)


def kernels(context: CheckContext) -> Iterator[CheckResult]:
    """Attention kernels: each runs or refuses as the rules predict, by kernel and format."""
    yield from _contact_checks().attention(context)


def context_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Context: GPU memory of a process without tensors, after kernels and libraries are loaded."""
    yield from _contact_checks().context_memory(context)


def predict_run(request: Request, inventory: Inventory) -> RunPrediction | str:
    """Predict the run; return the reason if that is not possible."""
    prediction: RunPrediction | str = _contact_checks().predict_run(request, inventory)
    return prediction


def _contact_checks() -> Any:
    from runner.tools.doctor import contact_checks

    return contact_checks
