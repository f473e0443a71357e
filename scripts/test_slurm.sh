#!/usr/bin/env bash
# Test the runner on a real SLURM: two virtual nodes on this machine, which are stopped at the end.
#
#   scripts/test_slurm.sh [--keep] [TEXT]   run all checks, or those whose name contains TEXT
#                                           --keep: keep the folder with all logs, and print its path
#
# Needs slurm-wlm and munge. As root on Debian or Ubuntu, they are installed; otherwise, if they are missing, nothing is
# tested and the exit code is 0. An existing SLURM is not affected: configuration, key, sockets and logs are in a separate
# folder, and the ports are 17000 to 17002.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

keep=false
[[ ${1:-} != --keep ]] || { keep=true && shift; }
selected=${1:-}
num_ok=0 num_failed=0
pids=()

skip() {
    printf 'skipped: %s\n' "$1"
    exit 0
}

install_slurm() {
    local needed=(munged slurmctld slurmd srun sbatch scontrol) missing=() name
    for name in "${needed[@]}"; do
        command -v "$name" >/dev/null || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    [[ $(id -u) == 0 ]] || skip "${missing[*]} are not installed, and only root could install them"
    command -v apt-get >/dev/null || skip "${missing[*]} are not installed, and there is no apt-get"
    printf 'installing slurm-wlm and munge\n'
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"$folder/apt.log" 2>&1 || skip "slurm-wlm and munge cannot be installed: $(tail -n 1 -- "$folder/apt.log")"
}

start_cluster() {
    local user node host
    user=$(id -un)
    host=$(hostname -s)
    mkdir -p -- "$folder"/{ctld,n1,n2}
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" \
        >"$folder/munged.out" 2>&1 &
    pids+=($!)
    cat >"$folder/slurm.conf" <<END
ClusterName=virtual
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=17000
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$folder/ctld
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
JobRequeue=1
KillWait=20
OverTimeLimit=0
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4
END
    export SLURM_CONF=$folder/slurm.conf
    wait_for 10 test -S "$folder/munge.socket"
    slurmctld -D >"$folder/slurmctld.out" 2>&1 &
    pids+=($!)
    for node in n1 n2; do
        slurmd -D -N "$node" >"$folder/slurmd-$node.out" 2>&1 &
        pids+=($!)
    done
    wait_for 30 both_idle
}

both_idle() { [[ $(sinfo --noheader --format=%D --states=idle 2>/dev/null) == 2 ]]; }

# wait_for SECONDS COMMAND...: repeat the command until it succeeds; fail after the timeout
wait_for() {
    local limit=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < limit)) || return 1
        sleep 0.5
    done
}

tear_down() {
    local pid
    trap - EXIT
    if [[ -n ${SLURM_CONF:-} ]]; then
        scancel --user="$(id -un)" --full >/dev/null 2>&1 || true
        sleep 1
    fi
    for pid in $(printf '%s\n' "${pids[@]}" | tac); do
        kill "$pid" 2>/dev/null || true
    done
    for pid in "${pids[@]}"; do
        wait "$pid" 2>/dev/null || true
    done
    if $keep || ((num_failed)); then
        printf 'logs: %s\n' "$folder"
    else
        rm -rf -- "$folder"
    fi
}

# check NAME COMMAND...: print whether the command succeeded, and its output if it failed
check() {
    [[ $1 == *"$selected"* ]] || return 0
    local name=$1 started=$SECONDS
    shift
    if "$@" >"$folder/check.log" 2>&1; then
        printf 'ok      %s (%s s)\n' "$name" $((SECONDS - started))
        num_ok=$((num_ok + 1))
    else
        printf 'FAILED  %s (%s s)\n' "$name" $((SECONDS - started))
        sed 's/^/        /' "$folder/check.log" | tail -n 40
        num_failed=$((num_failed + 1))
    fi
}

folder=$(mktemp -d /tmp/test-slurm.XXXXXX)
install_slurm
set_up --quiet dev slurm search
trap tear_down EXIT
trap 'exit 130' INT TERM
unset "${!SLURM_@}" "${!SBATCH_@}"
start_cluster || {
    printf 'FAILED  the cluster did not start; logs: %s\n' "$folder"
    tail -n 5 -- "$folder"/*.out "$folder"/*.log
    keep=true
    exit 1
}
printf 'SLURM %s, two virtual nodes\n' "$(sinfo --version | cut -d' ' -f2)"


# ---------------------------------------------------------------- checks

cd -- "$folder"
export MASTER_ADDR=127.0.0.1 # the names of virtual nodes cannot be resolved
export OMP_NUM_THREADS=1
python=$venv/bin/python
# A task whose samples take a fixed time on any machine: 50 ms per update on one rank.
cat >slow.py <<'END'
import time
import torch
from torch import nn
from runner import Task

SETTINGS = {"updates": 100, "global_batch_size": 2, "optimizer.lr": 0.01}


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.025)
        return torch.full((4,), index / 64), torch.tensor([index % 3 / 3])


class Fit(Task):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def dataset(self, split):
        return Slow()

    def loss(self, model, batch):
        points, values = batch
        return (model(points) - values).square().sum(), len(points)


def build(*, size: str = "tiny") -> Task:
    return Fit()
END
words=(train --task "$PWD/slow.py" device=cpu dataloader.num_workers=0 checkpoint.every=20 log_every=1 evaluate.every=0
    evaluate.samples=2)
run=("$venv/bin/accel-run" "${words[@]}")
rank=("$python" -m runner "${words[@]}" parallelism=ddp)

# state_of JOB: PENDING, RUNNING, COMPLETED, ... according to the controller
state_of() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }
restarts_of() { scontrol show job "$1" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p'; }
has_ended() { [[ $(state_of "$1") =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }
has_saved() { compgen -G "outputs/$1/checkpoints/update-*" >/dev/null; }

# submit ARGUMENTS...: train with launcher=slurm; set $job to the job id
submit() {
    "${run[@]}" launcher=slurm "$@" >submitted || return 1
    cat submitted
    job=$(sed -n 's/^submitted SLURM job \([0-9]*\) .*/\1/p' submitted)
    [[ -n $job ]]
}

ranks_are_detected() {
    local code="
import os
from runner.base.rank_env import detect_rank
member = detect_rank(os.environ)
print(member.rank, member.local_rank, member.world_size, member.num_local_ranks, member.store, member.attempt)"
    srun --nodes=2 --ntasks=3 --overcommit --distribution=block "$python" -c "$code" | sort >ranks
    cat ranks
    [[ $(cut -d' ' -f1-4 ranks) == $'0 0 3 2\n1 1 3 2\n2 0 3 1' ]] && [[ $(cut -d' ' -f5- ranks | sort -u | wc -l) == 1 ]]
}

no_rank_is_detected_in() {
    local code="
import os
from runner.base.rank_env import detect_rank
assert 'SLURM_JOB_ID' in os.environ
print(detect_rank(os.environ))"
    [[ $("$@" "$python" -c "$code") == None ]]
}

in_a_batch_script() {
    { printf '#!/bin/bash\n' && printf '%q ' "$@" && printf '\n'; } >batch.sh
    sbatch --wait --nodes=2 --ntasks=2 --output=batch.out batch.sh >/dev/null && cat batch.out
}

# finished NAME UPDATES: check that the run is done, and has exactly one row per update
finished() {
    "$python" - "outputs/$1" "$2" <<'END'
import json, sys
from pathlib import Path

folder, updates = Path(sys.argv[1]), int(sys.argv[2])
record = json.loads((folder / "run.json").read_text())
assert record["state"] == "done", record
rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
found = [row["update"] for row in rows if "train/loss" in row]
assert found == list(range(1, updates + 1)), (len(found), found[:3], found[-3:])
END
}

a_signal_saves_and_requeues() {
    submit run=warned updates=300 || return 1
    wait_for 60 has_saved warned || return 1
    scancel --signal=USR1 "$job"
    wait_for 120 has_ended "$job" || return 1
    scontrol show job "$job"
    cat outputs/warned/slurm/"$job"*
    [[ $(state_of "$job") == COMPLETED && $(restarts_of "$job") == 1 ]] && finished warned 300
}

a_task_runs_in() { squeue --noheader --steps --job="$1" | grep -q "$1\.0 "; }

a_signal_before_the_handler_requeues() {
    submit run=early updates=20 || return 1
    wait_for 30 a_task_runs_in "$job" || return 1
    scancel --signal=USR1 "$job"
    wait_for 60 has_ended "$job" || return 1
    scontrol show job "$job"
    cat outputs/early/slurm/"$job"*
    [[ $(state_of "$job") == COMPLETED && $(restarts_of "$job") == 1 ]] && finished early 20
}

the_time_limit_saves_and_requeues() {
    submit run=limited updates="$1" launcher.time_min=2 launcher.signal_s=90 || return 1
    wait_for 400 has_ended "$job" || return 1
    scontrol show job "$job"
    cat outputs/limited/slurm/"$job"*
    [[ $(state_of "$job") == COMPLETED && $(restarts_of "$job") -ge 1 ]] && finished limited "$1"
}

the_number_of_requeues_is_limited() {
    submit run=often updates=1000000 launcher.requeue_times=0 || return 1
    wait_for 60 has_saved often || return 1
    scancel --signal=USR1 "$job"
    wait_for 60 has_ended "$job" || return 1
    scontrol show job "$job"
    [[ $(state_of "$job") == FAILED ]] && scontrol show job "$job" | grep -q 'ExitCode=75:0'
}

a_canceled_job_has_saved() {
    submit run=canceled updates=1000000 || return 1
    wait_for 60 has_saved canceled || return 1
    scancel "$job"
    wait_for 60 has_ended "$job" || return 1
    sleep 1
    cat outputs/canceled/slurm/"$job"*
    [[ $(state_of "$job") == CANCELLED ]] && grep -q '"state": "preempted"' outputs/canceled/run.json
}

an_unknown_partition_is_rejected() {
    local code=0
    "${run[@]}" launcher=slurm launcher.partition=nowhere >refused 2>&1 || code=$?
    cat refused
    [[ $code == 78 ]] && grep -q "invalid partition" refused
}

two_nodes_train_as_one_process_does() {
    local code=0
    "${run[@]}" run=alone updates=60 && srun --nodes=2 --ntasks=2 "${rank[@]}" run=together updates=60 || return 1
    finished alone 60 && finished together 60 || return 1
    "$python" - <<'END'
import json
from pathlib import Path

def losses(name):
    rows = map(json.loads, Path(f"outputs/{name}/metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]

worst = max(abs(a - b) / abs(a) for a, b in zip(losses("alone"), losses("together"), strict=True))
print(f"largest relative difference of 60 losses: {worst:.1e}")
assert worst < 1e-5
END
}

a_signal_reaches_all_ranks() {
    submit run=pair updates=600 parallelism=ddp launcher.nodes=2 dataloader.num_workers=1 || return 1
    wait_for 60 has_saved pair || return 1
    scancel --signal=USR1 "$job"
    wait_for 180 has_ended "$job" || return 1
    scontrol show job "$job"
    cat outputs/pair/slurm/"$job"*.out
    [[ $(state_of "$job") == COMPLETED && $(restarts_of "$job") == 1 ]] && finished pair 600
}

a_killed_rank_ends_the_others() {
    local code=0 started step
    srun --nodes=2 --ntasks=2 --wait=60 "${rank[@]}" run=killed updates=100000 >killed.out 2>&1 &
    step=$!
    wait_for 60 has_saved killed || return 1
    started=$SECONDS
    srun_kills_rank 1 killed || return 1
    wait "$step" || code=$?
    cat killed.out
    printf 'exit code %s, %s s after the kill\n' "$code" $((SECONDS - started))
    ((code != 0 && SECONDS - started < 30))
}

a_port_in_use_exits_with_71_without_a_hang() {
    local code=0 started=$SECONDS port=29876 listener
    "$python" -c "
import socket, time
listener = socket.create_server(('127.0.0.1', $port))
time.sleep(300)" &
    listener=$!
    sleep 1
    MASTER_PORT=$port timeout 200 srun --nodes=2 --ntasks=2 "${rank[@]}" run=port updates=10 >port.out 2>&1 || code=$?
    kill "$listener"
    cat port.out
    printf 'exit code %s after %s s\n' "$code" $((SECONDS - started))
    [[ $code == 71 ]] && grep -q "MASTER_PORT" port.out && ((SECONDS - started < 180))
}

# The script from docs/scale.md, for this cluster and this task.
the_documented_script_saves_and_is_requeued() {
    local words
    words=$(printf '%q ' "${rank[@]}" run=page updates=600)
    sed -n '/^#!.bin.bash/,/^exit .code/p' "$root/docs/scale.md" | sed -e 's/ --gpus-per-node=4//' \
        -e 's/--ntasks-per-node=4/--ntasks-per-node=1/' -e 's/--cpus-per-task=8/--cpus-per-task=1/' \
        -e 's/--time=12:00:00/--time=10/' -e "s|^    python -m runner.*|    ${words//&/\\&}|" >page.sh
    cat page.sh
    job=$(sbatch --parsable --output=page.out page.sh) || return 1
    wait_for 60 has_saved page || return 1
    scancel --signal=USR1 "$job"
    wait_for 180 has_ended "$job" || return 1
    cat page.out
    [[ $(state_of "$job") == COMPLETED && $(restarts_of "$job") == 1 ]] && finished page 600
}

# sweep NAME ARGUMENTS...: a sweep with launcher=slurm; print the output and return the exit code
sweep() {
    "${run[@]}" -m run="$1" launcher=slurm "${@:2}" >>"$1.out" 2>&1
    local code=$?
    cat "$1.out"
    return $code
}

# submission_of NAME [N]: the job id of the N-th job array of a sweep, once it has been submitted
submission_of() { sed -n 's/^submitted SLURM job array \([0-9]*\) .*/\1/p' "$1.out" | sed -n "${2:-1}p"; }

# most_at_once ARRAY: print how many jobs of a job array ran at the same time
most_at_once() {
    scontrol show job "$1" | "$python" -c "
import re, sys
text = sys.stdin.read()
times = [(time, step) for name, step in (('StartTime', 1), ('EndTime', -1)) for time in re.findall(name + r'=(\S+)', text)]
count = most = 0
for time, step in sorted(times):  # within the same second, ends are counted before starts
    count += step
    most = max(most, count)
print(most)"
}

a_sweep_keeps_its_limit_and_resumes_a_canceled_trial() {
    local command=(sweep grid 'optimizer.lr=0.1,0.03,0.01,0.003' updates=100 together=2) code=0 pid array started=$SECONDS
    "${command[@]}" &
    pid=$!
    wait_for 60 has_saved grid/grid-2 && array=$(submission_of grid) || return 1
    scancel "${array}_2"
    wait "$pid" || code=$?
    printf 'exit code %s after %s s; at most %s jobs at once\n' "$code" $((SECONDS - started)) "$(most_at_once "$array")"
    [[ $code == 75 && $(most_at_once "$array") == 2 ]] || return 1
    [[ $(cut -d, -f4 outputs/grid/results.csv | tail -n +2 | tr '\n' ' ') == "finished stopped finished finished " ]] || return 1
    "${command[@]}" || return 1
    scontrol show job "$(submission_of grid 2)" | grep -q 'ArrayTaskId=2 ' || return 1
    for code in 1 2 3 4; do finished "grid/grid-$code" 100 || return 1; done
}

a_search_runs_two_jobs_at_once() {
    local started=$SECONDS number
    "$venv/bin/accel-run" search "${words[@]:1}" launcher=slurm run=search 'optimizer.lr=log(1e-3,1e-1)' updates=20 trials=4 \
        together=2 evaluate.every=20 || return 1
    printf '4 trials in %s s\n' $((SECONDS - started))
    for number in 1 2 3 4; do finished "search/search-$number" 20 || return 1; done
    [[ $("$python" -c "
import json
lines = map(json.loads, open('outputs/search/optuna.journal'))
print(sum(bool(line.get('values')) for line in lines))") == 4 ]]
}

an_interrupted_sweep_follows_its_jobs_again() {
    local command=(sweep follow 'seed=1,2' updates=200) code=0 array
    "${command[@]}" &
    wait_for 60 has_saved follow/follow-2 && array=$(submission_of follow) || return 1
    pkill -TERM --parent $! --full accel-run
    wait $! || code=$?
    printf 'exit code %s\n' "$code"
    [[ $code == 75 ]] || return 1
    scancel --signal=USR1 "${array}_1" # meanwhile, it saves, is requeued and resumes
    "${command[@]}" || return 1
    scontrol show job "$array"
    [[ -z $(submission_of follow 2) && $(scontrol show job "${array}_1" | sed -n 's/.*Restarts=\([0-9]*\).*/\1/p') == 1 ]] &&
        finished follow/follow-1 200 && finished follow/follow-2 200
}

# The process of a rank is identified by the environment variables set by srun.
srun_kills_rank() {
    local pid
    for pid in $(pgrep -f -- "run=$2"); do
        if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "SLURM_PROCID=$1" &&
            [[ $(readlink "/proc/$pid/exe") == *python* ]]; then
            kill -KILL "$pid"
            return
        fi
    done
    return 1
}

check "srun: three ranks on two nodes detect their rank and node" ranks_are_detected
check "the shell of a batch script is not a rank" no_rank_is_detected_in in_a_batch_script
check "a single srun task is not a rank" no_rank_is_detected_in srun --ntasks=1
check "srun: two ranks on two nodes have the same losses as one process" two_nodes_train_as_one_process_does
check "srun: a killed rank ends the others" a_killed_rank_ends_the_others
check "srun: if a port is in use, the run exits with 71 and no rank hangs" a_port_in_use_exits_with_71_without_a_hang
check "sbatch: the script of docs/scale.md gets SIGUSR1, saves, is requeued and finishes" \
    the_documented_script_saves_and_is_requeued
check "launcher=slurm: an unknown partition is rejected with SLURM's message" an_unknown_partition_is_rejected
check "launcher=slurm: on SIGUSR1, the run saves, is requeued and finishes" a_signal_saves_and_requeues
check "launcher=slurm: on SIGUSR1 before the handler is installed, the run is requeued" a_signal_before_the_handler_requeues
check "launcher=slurm: the signal reaches two ranks on two nodes" a_signal_reaches_all_ranks
check "launcher=slurm: at the time limit, the run saves, is requeued and finishes" the_time_limit_saves_and_requeues 1000
check "launcher=slurm: the number of requeues is limited" the_number_of_requeues_is_limited
check "launcher=slurm: on scancel, the run saves" a_canceled_job_has_saved
check "trials: a sweep of 4, at most 2 at once; a canceled trial resumes" a_sweep_keeps_its_limit_and_resumes_a_canceled_trial
check "trials: an interrupted sweep, when repeated, follows the same jobs" an_interrupted_sweep_follows_its_jobs_again
check "trials: a search of 4, at most 2 at once" a_search_runs_two_jobs_at_once

printf '%s ok, %s failed\n' "$num_ok" "$num_failed"
((num_failed == 0))
