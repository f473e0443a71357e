#!/usr/bin/env bash
# Run the tests: all of them three at a time, for most wait more than they compute, and then alone those that measure time.
# Arguments go to pytest, which then runs what they say in one process (paths are relative to the checkout).
# Without a GPU, those marked gpu are reported as skipped.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
set_up --quiet dev
cd -- "$root"

pytest=("$venv/bin/python" -m pytest -q --durations=10 -rs)
if (($#)); then
    exec "${pytest[@]}" "$@"
fi
mapfile -t files_alone < <(grep -rl --include="test_*.py" "pytest\.mark\.alone" tests)
status=0
# One thread each: threads that outnumber the cores wait for each other by spinning. The files come in the order of
# tests/conftest.py, the longest first.
OMP_NUM_THREADS=1 "${pytest[@]}" -n 3 --dist loadfile --no-loadscope-reorder -m "not alone" || status=$?
"${pytest[@]}" -m alone "${files_alone[@]}" || status=$?
exit "$status"
