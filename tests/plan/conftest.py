"""The NVML stub, compiled once for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.nvml_stub import NvmlStub, build_stub


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return build_stub(tmp_path_factory.mktemp("nvml_stub"))
