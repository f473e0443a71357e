"""Stubs of the SLURM commands: small scripts that store the state of the cluster in the folder $PLAYED.

sbatch stores the script and runs the jobs of an array one after the other, in the background; each job is a file in
`queue` until it ends. Files in the folder change what happens:

says         sbatch prints its content and fails
held         jobs wait in the queue
release      jobs start after squeue has listed them
interrupt    squeue sends SIGTERM to the command that waits for the jobs
cancel       squeue removes the job with this name from the queue
unreachable  squeue fails once while jobs are in the queue

In an array job, srun does not train: it only writes the `run.json` of a run. `task.act` determines how the run ends:
`fail` (unless $MENDED is set), `killed`, or otherwise success. scripts/test_slurm.sh uses a real SLURM.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SBATCH = r"""#!/bin/bash
cp -- "$1" "$PLAYED/script"
if [[ -e $PLAYED/says ]]; then cat "$PLAYED/says" >&2; exit 1; fi
mkdir -p "$PLAYED/queue" "$PLAYED/submitted"
job=$((42 + $(ls "$PLAYED/submitted" | wc -l)))
cp -- "$1" "$PLAYED/submitted/$job"
echo "Submitted batch job $job"
array=$(sed -n 's/^#SBATCH --array=\([^%]*\).*/\1/p' "$1" | tr -d "'")
numbers=()
for part in ${array//,/ }; do numbers+=($(seq "${part%-*}" "${part#*-}")); done
for number in "${numbers[@]}"; do echo "$job|$number|$1" >"$PLAYED/queue/${job}_$number"; done
for number in "${numbers[@]}"; do
    queued=$PLAYED/queue/${job}_$number
    while [[ -e $PLAYED/held && -e $queued ]]; do sleep 0.02; done
    [[ -e $queued ]] || continue
    SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$number SLURM_JOB_ID=$((1000 + number)) \
        bash "$PLAYED/submitted/$job" >"${1%/*}/${job}_${number}_0_log.out" 2>&1
    rm -f "$queued"
done </dev/null >/dev/null 2>&1 &
"""
SRUN = r"""#!/bin/bash
printf '%s\n' "$@" >"$PLAYED/srun"
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || exit "$CODE"
for word in "$@"; do
    case $word in
    run=*) name=${word#*=} ;;
    output_root=*) root=${word#*=} ;;
    task.act=*) act=${word#*=} ;;
    esac
    [[ $word == -* ]] || overrides+=,\"${word//\"/}\"
done
record() {
    printf '{"name": "%s", "state": "%s", "exit_code": %s, "metrics": {"val/loss": 0.%s}, "overrides": [%s]}' \
        "$name" "$1" "$2" "$SLURM_ARRAY_TASK_ID" "${overrides#,}" >"$root/$name/run.json"
}
mkdir -p "$root/$name"
record running null
case ${act:-}:${MENDED:-} in
fail:) record failed 70 && exit 70 ;;
killed:*) kill -KILL $$ ;;
esac
record "done" 0
"""
SQUEUE = r"""#!/bin/bash
cd "$PLAYED" || exit
if [[ -n $(ls queue 2>/dev/null) ]]; then
    if [[ -e unreachable ]]; then
        rm unreachable
        echo "slurm_load_jobs error: Unable to contact slurm controller" >&2
        exit 1
    fi
    [[ ! -e interrupt ]] || kill -TERM $PPID
    [[ ! -e cancel ]] || rm -f "queue/$(cat cancel)"
    cat queue/* 2>/dev/null
    [[ ! -e release ]] || rm -f held release
fi
exit 0
"""
SCONTROL = """#!/bin/bash
echo "$*" >"$PLAYED/scontrol"
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stubs on the PATH; `folder` becomes the working directory and $PLAYED."""
    commands = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE}
    for name, text in commands.items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setenv("PLAYED", str(folder))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_") or name == "RANK"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
