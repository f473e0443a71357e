#!/usr/bin/env bash
# Set up the environment, then exec accel-run in the current folder.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

# commands: begin (written by scripts/generate.py)
modes=(train resume search inference evaluate both plan explain runs status report monitor profile advise benchmark tune doctor export import new completion)
declare -A meaning=(
    [train]="train a task; the same command with the same run=NAME resumes"
    [resume]="resume a stopped run, from any folder"
    [search]="search for the settings that give the best metric; each trial is a separate run"
    [inference]="predict with the best or another checkpoint of a run (short: infer)"
    [evaluate]="compute the metrics of a trained run on a split, such as split=test"
    [both]="train, then predict with the trained model"
    [plan]="show every setting with its reason, without training"
    [explain]="show which file, profile or override set a value"
    [runs]="list the runs: task, state, updates, last metric, age, size"
    [status]="show a run: progress, checkpoints, last error"
    [report]="write an HTML report of a run, or compare several"
    [monitor]="monitor GPUs, CPU, RAM and processes, live or for a past run"
    [profile]="profile an update: operators, modules, memory, synchronizations"
    [advise]="find settings that make a run faster, verified by measurement"
    [benchmark]="measure the speedup of techniques on this machine, interleaved with the baseline"
    [tune]="find the fastest settings for this machine and save them as a hardware profile"
    [doctor]="check this machine for everything training needs, and suggest fixes"
    [export]="export the model of a run as safetensors, a torch.export program and ONNX, each verified"
    [import]="convert an untrusted .pt file to safetensors without executing it"
    [new]="write a one-file task template"
    [completion]="print the shell completion script for bash, zsh or fish"
)
# commands: end

usage() {
    local mode
    printf 'usage: scripts/run.sh MODE [overrides...]\n\n'
    for mode in "${modes[@]}"; do
        printf '  %-10s  %s\n' "$mode" "${meaning[$mode]}"
    done
    printf '\n  scripts/run.sh train +hardware=t4\n  scripts/run.sh train task=gpt optimizer.lr=3e-4 updates=1000\n'
    printf '  scripts/run.sh inference run=last\n  scripts/run.sh MODE --help\n\n'
    printf 'The first call creates a virtual environment in the checkout (scripts/setup.sh --help).\n'
}

is_mode() {
    local mode
    for mode in "${modes[@]}"; do
        [[ $mode != "$1" ]] || return 0
    done
    return 1
}

# Report an argument that is not a MODE, on few lines, so that it does not scroll off the screen.
refuse() {
    if [[ $1 == *=* ]]; then
        printf 'scripts/run.sh: unknown MODE %s; a MODE comes first, for example\n' "$1" >&2
        printf '  scripts/run.sh train%s\n' "$(printf ' %q' "$@")" >&2
    else
        printf 'scripts/run.sh: unknown MODE %s; choose one of\n' "$1" >&2
        fmt -w 58 <<<"${modes[*]}" | sed 's/^/  /' >&2
    fi
    printf 'to see what each of them does: scripts/run.sh --help\n' >&2
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
    shift $(($# > 0)) # an empty MODE counts as none
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
        refuse "$mode" "$@"
        exit "$EXIT_USAGE"
    fi
    ;;
esac

# The extra that installs the data of a task has the name of the task.
extras=()
for word in "$@"; do
    if [[ $word =~ ^task=([a-z0-9_]+)$ ]] && grep -q "^${BASH_REMATCH[1]} = \[" "$root/pyproject.toml"; then
        extras+=("${BASH_REMATCH[1]}")
    fi
done
[[ $mode != search ]] || extras+=(search)

set_up --quiet "${extras[@]}"
exec "$venv/bin/accel-run" "$mode" "$@"
