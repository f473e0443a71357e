#!/usr/bin/env bash
# Run the tests with three workers, because most tests wait more than they compute.
#
#   scripts/test.sh              laws, commands, faults in their short form, end-to-end runs: 5 minutes on two cores
#   scripts/test.sh --slow       also the tests marked slow, as continuous integration does: 16 minutes
#   scripts/test.sh --all        also all cases of sampled tests, the long fault tests and the browser: hours
#                                (scripts/test_slurm.sh and scripts/test_elastic.sh test SLURM and returning machines)
#   scripts/test.sh ARGUMENT...  passed to pytest, in one process (paths are relative to the checkout)
#
# Tests marked slow mostly run the same code as the others, in more situations. Random choices follow ACCEL_RUN_SEED
# (default 1); a failing case names the seed. Tests marked gpu are skipped without a GPU, and run last with one.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
selected="not slow"
case ${1:-} in
--slow)
    selected=""
    shift
    ;;
--all)
    export ACCEL_RUN_FAULTS=long
    selected=""
    shift
    ;;
esac
set_up --quiet dev
cd -- "$root"

unset PYTHONDONTWRITEBYTECODE # with it, hundreds of processes would compile the same modules
pytest=("$venv/bin/python" -m pytest -q --durations=10 -rfEs)
if (($#)); then
    exec "${pytest[@]}" "$@"
fi
# One thread each: oversubscribed threads busy-wait for each other. Files run in the order of tests/conftest.py,
# longest first.
export OMP_NUM_THREADS=1
if ! nvidia-smi -L > /dev/null 2>&1; then
    exec "${pytest[@]}" -m "$selected" --workers 3
fi
# On a machine with GPUs, only tests/gpu sees them, in one process: the other tests fork processes that train.
code=0
CUDA_VISIBLE_DEVICES="" "${pytest[@]}" -m "$selected" --workers 3 --ignore tests/gpu || code=$?
"${pytest[@]}" -m "$selected" tests/gpu || code=$?
exit "$code"
