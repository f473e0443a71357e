#!/usr/bin/env bash
# Run the tests; arguments go to pytest (paths are relative to the checkout). Without a GPU, those marked gpu are reported as skipped.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
set_up --quiet dev
cd -- "$root"

exec "$venv/bin/python" -m pytest -q --durations=10 -rs "$@"
