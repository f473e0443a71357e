#!/usr/bin/env bash
# Repeat the tests under different loads, to show that none depends on time or on the number of free cores.
#
#   scripts/prove_tests.sh [N [ARGUMENT...]]   run scripts/test.sh N times (default 10) with these arguments
#
# The first half runs on an idle machine, the others with two busy loops and a disk writer in the background, and the last
# one on a single core. Prints exit code, duration and failed tests of each run. Exit code 1: a run failed; its log is kept.
set -euo pipefail
cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.."
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
fi
runs=${1:-10}
if [[ ! $runs =~ ^[1-9][0-9]*$ ]]; then
    printf 'prove_tests: the number of runs must be an integer above 0, but is %s\n' "$runs" >&2
    exit 64
fi
shift $(($# > 0))

logs=$(mktemp -d)
loads=()

start_loads() {
    local _
    for _ in 1 2; do
        (while :; do :; done) &
        loads+=("$!")
    done
    (while :; do dd if=/dev/zero of="$logs/written" bs=1M count=64 conv=fsync status=none; done) &
    loads+=("$!")
}

stop_loads() {
    ((${#loads[@]})) || return 0
    kill "${loads[@]}" 2>/dev/null || true
    wait "${loads[@]}" 2>/dev/null || true
    loads=()
    rm -f -- "$logs/written"
}
trap stop_loads EXIT
trap 'exit 130' INT TERM

first_core=$(taskset -cp $$)
first_core=${first_core##*: }
first_core=${first_core%%[-,]*}
failed=0
for ((number = 1; number <= runs; number++)); do
    load="idle" prefix=()
    if ((number == runs && runs > 1)); then
        load="one core" prefix=(taskset -c "$first_core")
    elif ((number > (runs + 1) / 2 || (number == runs - 1 && runs > 2))); then
        load="busy"
        start_loads
    fi
    code=0
    SECONDS=0
    "${prefix[@]}" scripts/test.sh "$@" >"$logs/$number.log" 2>&1 || code=$?
    took=$SECONDS
    stop_loads
    printf 'run %d of %d, %s: exit code %d, %d s\n' "$number" "$runs" "$load" "$code" "$took"
    if ((code)); then
        failed=$((failed + 1))
        grep -E '^(FAILED|ERROR) ' "$logs/$number.log" | sed 's/^/    /' || true
        printf '    log: %s\n' "$logs/$number.log"
    fi
done
printf '%d of %d runs failed\n' "$failed" "$runs"
((failed)) || rm -r -- "$logs"
((failed == 0))
