#!/usr/bin/env bash
# Check the assumptions of accel-run about the CUDA build of torch, without a GPU.
#
#   scripts/first_contact.sh hollow [CHECK]     CHECK: allocator, attention, waits, contexts, host_buffer, forks, ranks,
#                                               prediction, compiled or graphs; default: all
#
# Runs torch's host code on a hollow GPU (tests/stand_ins/hollow): a CUDA runtime with host memory, and kernels that do
# nothing. Prints ok or DIFFERS for each check and exits with 1 if anything differs. The first call
# installs the CUDA build of torch (6 GB, 5 minutes) outside of the checkout. On a machine with a GPU use
# `accel-run doctor first_contact`.
#
#   ACCEL_RUN_HOLLOW   folder of the environment and the libraries; default: ~/.cache/accel-run/hollow
#   ACCEL_RUN_PYTHON   the Python interpreter to use
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

readonly TORCH=2.14.1 NEEDED_GB=12
folder=${ACCEL_RUN_HOLLOW:-${XDG_CACHE_HOME:-$HOME/.cache}/accel-run/hollow}

if [[ ${1:-} != hollow || $# -gt 2 ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit $EXIT_USAGE
fi
command -v gcc nm >/dev/null || { _say "gcc and nm are required"; exit $EXIT_SYSTEM; }
mkdir -p -- "$folder"
folder=$(cd -- "$folder" && pwd)
if [[ $folder == "$root" || $folder == "$root"/* ]]; then
    _say "ACCEL_RUN_HOLLOW must be outside of the checkout, but is $folder"
    exit $EXIT_USAGE
fi
wanted=$(printf '%s\n' "$TORCH" "$(_fingerprint)" | sha256sum)
if [[ ! -r $folder/.stamp || $(<"$folder/.stamp") != "$wanted" ]]; then
    free_gb=$(df --output=avail -BG -- "$folder" | tr -dc '0-9\n' | tail -n 1)
    if [[ ! -d $folder/env && $free_gb -lt $NEEDED_GB ]]; then
        _say "$folder has $free_gb GB free, but the CUDA build of torch needs $NEEDED_GB GB while it is installed"
        exit $EXIT_SYSTEM
    fi
    venv=$folder/env
    [[ -x $venv/bin/python ]] || "$(_find_python)" -m venv "$venv"
    _say "installing torch $TORCH with CUDA in $venv"
    sed -E -e "s/^torch==.*/torch==$TORCH/" -e '/^(setuptools|triton|sympy|filelock|nvidia-c.*)==/d' \
        "$root/scripts/constraints.txt" >"$folder/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$folder/constraints.txt")
    if ! "${install[@]}" torch pytest --editable "$root" >"$folder/install.log" 2>&1; then
        tail -n 20 -- "$folder/install.log" >&2
        exit $EXIT_SYSTEM
    fi
    # The headers of the CUDA runtime include these, which must have the same version.
    runtime=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("nvidia-cuda-runtime"))')
    "${install[@]}" --no-deps "nvidia-cuda-crt==${runtime%.*}.*" >>"$folder/install.log" 2>&1
    printf '%s\n' "$wanted" >"$folder/.stamp"
fi
cd -- "$root"
exec env PYTHONPATH="$root" PYTHONDONTWRITEBYTECODE=1 \
    "$folder/env/bin/python" tests/stand_ins/hollow/checks.py "$folder/built" "${@:2}"
