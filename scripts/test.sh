#!/usr/bin/env bash
# Run the tests; arguments go to pytest (paths are relative to the checkout). Without a GPU, those marked gpu stay out.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
set_up --quiet dev
cd -- "$root"

selection=()
[[ -e /dev/nvidiactl ]] || selection=(-m "not gpu")
exec "$venv/bin/python" -m pytest -q --durations=10 "${selection[@]}" "$@"
