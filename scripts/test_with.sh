#!/usr/bin/env bash
# Run the tests with another Python, torch or Hydra version, in a separate environment: .venv-<versions>.
#
#   scripts/test_with.sh [--python python3.12] [--torch 2.11.0] [--hydra 1.4.0rc3] [pytest arguments]
#
# For packages whose pinned version the other torch does not accept, pip selects the version.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)

python=python3 torch="" hydra=""
while [[ ${1:-} == --python || ${1:-} == --torch || ${1:-} == --hydra ]]; do
    printf -v "${1#--}" '%s' "${2:?needs a value}"
    shift 2
done

venv=$root/.venv-$(basename -- "$python")-torch${torch:-pinned}-hydra${hydra:-pinned}
constraints=$venv/constraints.txt
if [[ ! -e $venv/.ready ]]; then
    "$python" -m venv "$venv"
    sed -E ${torch:+-e "s/^torch==.*/torch==$torch/"} ${torch:+-e '/^(setuptools|triton|sympy|nvidia-c.*)==/d'} \
        ${hydra:+-e "s/^hydra-core==.*/hydra-core==$hydra/"} ${hydra:+-e '/^(omegaconf|antlr4-python3-runtime)==/d'} \
        "$root/scripts/constraints.txt" >"$constraints"
    "$venv/bin/pip" install --quiet ${hydra:+--pre} --constraint "$constraints" torch --editable "${root}[dev]"
    : >"$venv/.ready"
fi
cd -- "$root"
"$venv/bin/python" -c 'import sys, torch, hydra; print("python", sys.version.split()[0], "torch", torch.__version__, "hydra", hydra.__version__)'
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
