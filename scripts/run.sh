#!/usr/bin/env bash
# Set everything up, then become accel-run: its signals, its exit code, outputs in the folder you are in.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

modes=(train inference both resume search plan explain runs status report monitor profile advise benchmark tune doctor export import new completion)
declare -A meaning=(
    [train]="train a task; the same command with the same run=NAME resumes"
    [resume]="go on with a run that was stopped"
    [search]="search settings with Optuna, each trial a run"
    [inference]="predict with the newest checkpoint of a run (short: infer)"
    [both]="train, then predict with what was trained"
    [plan]="show every derived value with its reason, and stop"
    [explain]="tell which file, profile or override set a value"
    [runs]="list the runs: task, state, updates, last metric, age, size"
    [status]="show a run: progress, checkpoints, last error"
    [report]="write a page about a run with its charts, or about several beside each other"
    [monitor]="watch GPUs, CPU, RAM and who uses them, live or of a run"
    [profile]="show what an update is made of: operators, modules, memory, waits"
    [advise]="find what would make a run faster, and try it before saying so"
    [benchmark]="measure what techniques gain on this machine, each against the baseline in turns"
    [tune]="find the settings that are fastest here, and write them as a hardware profile"
    [doctor]="try what training needs on this machine, and say what to change"
    [export]="write the model of a run as safetensors, torch.export program and ONNX, each checked"
    [import]="make a safetensors file of somebody's .pt, without running what it holds"
    [completion]="print what makes the shell complete accel-run's words"
    [new]="write a one-file task of your own"
)

usage() {
    local mode
    printf 'usage: scripts/run.sh MODE [overrides...]\n\n'
    for mode in "${modes[@]}"; do
        printf '  %-10s  %s\n' "$mode" "${meaning[$mode]}"
    done
    printf '\n  scripts/run.sh train +hardware=t4\n  scripts/run.sh train task=gpt optimizer.lr=3e-4 updates=1000\n'
    printf '  scripts/run.sh inference run=last\n  scripts/run.sh MODE --help\n\n'
    printf 'The first call makes an environment in the checkout (scripts/setup.sh --help).\n'
}

is_mode() {
    local mode
    for mode in "${modes[@]}"; do
        [[ $mode != "$1" ]] || return 0
    done
    return 1
}

choose_mode() {
    local answer i
    for i in "${!modes[@]}"; do
        printf '  %2d  %-10s  %s\n' $((i + 1)) "${modes[i]}" "${meaning[${modes[i]}]}" >&2
    done
    while read -r -p "MODE, as a number or a name: " answer; do
        if [[ $answer =~ ^[1-9][0-9]?$ && $answer -le ${#modes[@]} ]]; then
            answer=${modes[answer - 1]}
        fi
        if is_mode "$answer"; then
            printf '%s\n' "$answer"
            return
        fi
    done
    printf '\n' >&2
    return 1
}

case ${1:-} in
-h | --help | help)
    usage
    exit
    ;;
"")
    shift $(($# > 0)) # an empty MODE is none
    if [[ -t 0 && -t 2 ]] && mode=$(choose_mode); then
        printf 'next time: scripts/run.sh %s\n' "$mode" >&2
    else
        usage >&2
        exit "$EXIT_USAGE"
    fi
    ;;
*)
    mode=$1
    shift
    [[ $mode != infer ]] || mode=inference
    if ! is_mode "$mode"; then
        printf 'scripts/run.sh: MODE must be one of those below, but is %s\n' "$mode" >&2
        usage >&2
        exit "$EXIT_USAGE"
    fi
    ;;
esac

# What the task's data lies in is an extra of the same name.
extras=()
for word in "$@"; do
    if [[ $word =~ ^task=([a-z0-9_]+)$ ]] && grep -q "^${BASH_REMATCH[1]} = \[" "$root/pyproject.toml"; then
        extras+=("${BASH_REMATCH[1]}")
    fi
done
[[ $mode != search ]] || extras+=(search)

set_up --quiet "${extras[@]}"
exec "$venv/bin/accel-run" "$mode" "$@"
