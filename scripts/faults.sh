#!/usr/bin/env bash
# Inject faults until the target counts are reached, and print the counts.
#
#   scripts/faults.sh                        as in scripts/test.sh: minutes
#   scripts/faults.sh --long                 the long form: hours
#   scripts/faults.sh --long crash_states    one suite (a pytest -k expression)
#   --seed N    random seed        --count N    number of injections per suite
#   --tally FILE    append the counts as JSON lines
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

arguments=()
while (($#)); do
    case $1 in
        --long) export ACCEL_RUN_FAULTS=long ;;
        --seed | --count | --tally)
            (($# >= 2)) || { printf 'faults.sh: %s needs a value\n' "$1" >&2; exit 64; }
            case $1 in
                --seed) export ACCEL_RUN_SEED=$2 ;;
                --count) export ACCEL_RUN_COUNT=$2 ;;
                --tally) ACCEL_RUN_TALLY=$(realpath -- "$2"); export ACCEL_RUN_TALLY ;;
            esac
            shift ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) printf 'faults.sh: unknown option %s; see --help\n' "$1" >&2; exit 64 ;;
        *) arguments+=(-k "$1") ;;
    esac
    shift
done
set_up --quiet dev
cd -- "$root"

exec "$venv/bin/python" -m pytest -q -rs --timeout=0 tests/faults "${arguments[@]}"
