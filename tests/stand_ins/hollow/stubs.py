"""Build the hollow GPU from the C libraries in this folder, with a no-op for every other function of CUDA.

    python stubs.py FOLDER

Run it with a Python that has the CUDA build of torch and CUDA's headers (nvidia-cuda-runtime, nvidia-cuda-crt).
It writes libraries to FOLDER; `environment` returns variables that load them instead of the real ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = r"^(cublas|cudnn|cufft|cusolver|cusparse|curand|cufile|cuFile|nccl|cuda|__cuda)"


def environment(folder: Path, gpus: int = 1, mib: int = 8192, capability: str = "8.0") -> dict[str, str]:
    """Return os.environ with the variables of hollow GPUs."""
    described = {"HOLLOW_GPUS": str(gpus), "HOLLOW_MIB": str(mib), "HOLLOW_CAPABILITY": capability}
    preloaded = " ".join(str(folder / name) for name in ("libhollow.so", "libcuda.so.1"))
    result = {"LD_PRELOAD": preloaded, "LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder)}
    return {**os.environ, **described, **result}


def build(folder: Path) -> None:
    """Compile the libraries into a folder. On failure, show the compiler's output and raise CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = _site() / "nvidia" / "cu13" / "include"
    fabric = ["-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "nvml.c")]
    subprocess.run(["gcc", "-shared", "-fPIC", *fabric], check=True)
    for header, source, target in (
        ("cuda_runtime_api.h", ("cudart.c", "libraries.c"), "libhollow.so"),
        ("cuda.h", ("driver.c",), "libcuda.so.1"),
    ):
        named = _declared(headers / header, headers)
        stubs = folder / f"{target}.c"
        if target == "libhollow.so":
            named |= _called_by_torch()
        stubs.write_text("".join(f"__attribute__((weak)) int {name}(void) {{ return 0; }}\n" for name in sorted(named)))
        places = [str(HERE / name) for name in source]
        options = ["-shared", "-fPIC", "-O1", "-w", "-fno-builtin", f"-I{headers}", "-pthread", "-ldl"]
        # They are compiled separately, because the stubs have no parameters, unlike the declarations in the headers.
        subprocess.run(["gcc", *options, "-c", "-o", str(stubs.with_suffix(".o")), str(stubs)], check=True)
        line = ["gcc", *options, "-o", str(folder / target), *places, str(stubs.with_suffix(".o"))]
        subprocess.run([*line, f"-Wl,-soname,{target}"], check=True)


def _site() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def _declared(header: Path, headers: Path) -> set[str]:
    """Return the linker names of the functions that a header declares."""
    text = subprocess.run(
        ["gcc", "-E", "-P", f"-I{headers}", str(header)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\b(?:cudaError_t|CUresult)\s+(?:\w+\s+)?(cu\w+)\s*\(", text))


def _called_by_torch() -> set[str]:
    """Return the functions of NVIDIA's libraries that torch's libraries call."""
    libraries = sorted((_site() / "torch" / "lib").glob("lib*.so"))
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, libraries)], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1].partition("@")[0] for line in text.splitlines() if line.strip().startswith(("U ", "w "))}
    return {name for name in names if re.match(LIBRARIES, name)}


if __name__ == "__main__":
    build(Path(sys.argv[1]))
