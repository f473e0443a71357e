#!/usr/bin/env bash
# Create the virtual environment for the other scripts. If it is up to date, return within milliseconds.
#
#   scripts/setup.sh [--quiet] [EXTRA...]      EXTRA: dev, tasks (or one of them: hyperspectral, tractodiff),
#                                               search, metrics, mirror, 8bit, bpe, docs, lora, onnx, ray, schedulefree, slurm,
#                                               tensorboard, transformers; cape and plots are accepted and add nothing
#                                               (matplotlib is always installed)
#   source scripts/setup.sh; set_up [--quiet] [EXTRA...]
#
# Sets $root (the checkout) and $venv (the environment). Installed extras are kept. Concurrent calls wait for each
# other. After an interruption the next call starts again, because the stamp is written last.
#
#   ACCEL_RUN_VENV     path of the environment; default: .venv in the checkout
#   ACCEL_RUN_PYTHON   the Python interpreter to use; default: the first of python3, python3.12, python3.11 that is >= 3.11
set -euo pipefail

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd)
venv=${ACCEL_RUN_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv

readonly EXIT_USAGE=64 EXIT_SYSTEM=71 # as in runner/base/errors.py

set_up() {
    local quiet=false
    if [[ ${1:-} == --quiet ]]; then
        quiet=true
        shift
    fi
    if _is_ready "$@"; then
        $quiet || _say "$venv is up to date"
        return
    fi
    _know_extras "$@"
    mkdir -p -- "$venv"
    (
        exec 9>>"$venv/.lock" # opened for writing, because NFS requires that for a lock
        if ! flock --nonblock 9; then
            _say "another setup is running in $venv; waiting for it"
            flock 9
        fi
        _is_ready "$@" || _install "$@"
    )
}

_install() {
    local started=$SECONDS python extras
    extras=$({ sed -n 2p "$venv/.stamp" 2>/dev/null || true; printf '%s\n' "$@"; } | tr ' ' '\n' | sed '/^$/d' | sort -u)
    rm -f -- "$venv/.stamp"
    : >"$venv/setup.log"

    if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$(_find_python)
        _say "creating $venv with $("$python" --version)"
        find "$venv" -mindepth 1 -maxdepth 1 ! -name .lock ! -name setup.log -exec rm -rf -- {} +
        "$python" -m venv "$venv" >>"$venv/setup.log" 2>&1 || _stop "$python could not make an environment in $venv"
    fi
    # torch first and alone: by far the largest download, which must not be lost if a later package fails.
    if ! _has_torch; then
        _say "installing torch $(_torch_version) (the download may be several GB)"
        _pip_install torch
    fi
    _say "installing accel-run from $root${extras:+ with ${extras//$'\n'/, }}"
    _pip_install --editable "$root${extras:+[${extras//$'\n'/,}]}"

    printf '%s\n%s\n' "$(_fingerprint)" "${extras//$'\n'/ }" >"$venv/.stamp.new"
    mv -- "$venv/.stamp.new" "$venv/.stamp"
    _say "done in $((SECONDS - started)) s; to use accel-run in this shell: source $(printf %q "$venv")/bin/activate"
}

_is_ready() {
    local known="" installed="" extra
    [[ -x $venv/bin/python && -r $venv/.stamp ]] || return 1
    { read -r known && read -r installed; } <"$venv/.stamp" || return 1
    [[ $known == "$(_fingerprint)" ]] || return 1
    for extra in "$@"; do
        [[ " $installed " == *" $extra "* ]] || return 1
    done
}

_torch_version() { sed -n 's/^torch==//p' "$root/scripts/constraints.txt"; }

_has_torch() { compgen -G "$venv/lib/python*/site-packages/torch-$(_torch_version)[.+]*" >/dev/null; }

# Includes the path, because an environment must be reinstalled if its checkout was moved.
_fingerprint() {
    { printf '%s\n' "$root" && cat -- "$root/pyproject.toml" "$root/scripts/constraints.txt"; } | sha256sum
}

# pip only warns about unknown extras.
_know_extras() {
    local extra known
    known=$(awk '/^\[/ { inside = /^\[project\.optional-dependencies\]/ } inside && /^[A-Za-z0-9_-]+ *=/ { print $1 }' \
        "$root/pyproject.toml")
    for extra in "$@"; do
        if [[ $'\n'$known$'\n' != *$'\n'"$extra"$'\n'* ]]; then
            _say "an extra must be one of ${known//$'\n'/, }, but is $extra"
            exit $EXIT_USAGE
        fi
    done
}

_find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [[ -z ${ACCEL_RUN_PYTHON:-} ]] || candidates=("$ACCEL_RUN_PYTHON")
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        if ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            _say "$candidate cannot create environments; install its venv module (Debian, Ubuntu: apt install python3-venv)"
            exit $EXIT_SYSTEM
        fi
        printf '%s\n' "$candidate"
        return
    done
    _say "Python 3.11 or newer is required; tried: ${candidates[*]}"
    _say "install it, or set ACCEL_RUN_PYTHON=/path/to/python3.12"
    exit $EXIT_SYSTEM
}

_pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/scripts/constraints.txt" "$@" >>"$venv/setup.log" 2>&1 || _stop "pip failed"
}

_stop() {
    _say "$1; run the same command again. Last lines of $venv/setup.log:"
    tail -n 20 -- "$venv/setup.log" >&2
    exit $EXIT_SYSTEM
}

_say() { printf 'setup: %s\n' "$*" >&2; }

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    case ${1:-} in
    -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" ;;
    *) set_up "$@" ;;
    esac
fi
