#!/usr/bin/env bash
# Test that a run continues when a machine leaves, and uses it again when it returns: two agents of torchrun on this
# machine stand for two machines with two ranks each. Takes about seven minutes on two cores.
#
#   scripts/test_elastic.sh [--keep]      --keep: keep the folder with all logs, and print its path
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"

set_up --quiet dev
folder=$(mktemp -d /tmp/test-elastic.XXXXXX)
keep=false
[[ ${1:-} != --keep ]] || keep=true
declare -A agents=()

tear_down() {
    local code=$? name
    trap - EXIT
    for name in "${!agents[@]}"; do
        stop_agent "$name"
    done
    if $keep || ((code)); then
        printf 'logs: %s\n' "$folder"
    else
        rm -rf -- "$folder"
    fi
}
trap tear_down EXIT

cat >"$folder/fit.py" <<'PYTHON'
import time
import torch
from torch import nn
from runner import Task

SETTINGS = {"global_batch_size": 4, "optimizer.lr": 0.01}


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((4,), index / 64, dtype=torch.float64), torch.tensor([index % 3 / 3], dtype=torch.float64)


class Fit(Task):
    def __init__(self):
        # In float64, because rounding errors of float32 (1e-7) grow to 1e-4 in the losses of 1,500 updates
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def dataset(self, split):
        return Slow()

    def loss(self, model, batch):
        points, values = batch
        return (model(points) - values).square().sum(), len(points)


def build() -> Task:
    return Fit()
PYTHON
cd -- "$folder"
port=$("$venv/bin/python" -c "
import socket
with socket.create_server(('127.0.0.1', 0)) as listener:
    print(listener.getsockname()[1])")
updates=1500
words=(train --task "$folder/fit.py" device=cpu "updates=$updates" log_every=1 evaluate.every=0 evaluate.samples=4
    checkpoint.every=20 dataloader.num_workers=0 monitor=off)

# start_agent NAME: start the agent of a machine, in a process group
start_agent() {
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1 setsid "$venv/bin/torchrun" --nnodes 1:2 --nproc-per-node 2 \
        --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint "localhost:$port" --rdzv-id elastic \
        --rdzv-conf last_call_timeout=2 -m runner "${words[@]}" parallelism=ddp run=elastic >>"$1.log" 2>&1 &
    agents[$1]=$!
}

# stop_agent NAME: kill the machine
stop_agent() {
    local pid=${agents[$1]} children
    children=$(pgrep --parent "$pid" || true)
    # shellcheck disable=SC2086
    kill -KILL "$pid" $children 2>/dev/null || true # every rank leads a separate session
    wait "$pid" 2>/dev/null || true
    unset "agents[$1]"
}

# num_starts: print how often training has started
num_starts() { grep -c '"kind": "phase"' outputs/elastic/events.jsonl 2>/dev/null || true; }

# trains_on RANKS STARTS: true if the run has started at least STARTS times, and now trains on RANKS ranks
trains_on() {
    local batch # 4 = 1 x 2 x 2 (micro-batch x accumulation x ranks)
    batch=$(grep '(micro-batch x accumulation x ranks)' outputs/elastic/console.log 2>/dev/null | tail -n 1)
    [[ $(num_starts) -ge $2 && $batch == *" x $1 (micro-batch"* ]]
}

# expect WHAT RANKS STARTS: wait until the run trains on RANKS ranks
expect() {
    local began=$SECONDS
    until trains_on "$2" "$3"; do
        ((SECONDS < began + 150)) || { printf 'FAILED  %s\n' "$1" && tail -n 20 -- *.log && exit 1; }
        sleep 0.5
    done
    printf 'ok      %s: %s ranks, %s s\n' "$1" "$2" $((SECONDS - began))
    sleep 3 # some updates
}

start_agent a
expect "one machine" 2 1
start_agent b
expect "another one joins" 4 2
stop_agent b
expect "it is lost" 2 3
start_agent b
expect "it returns" 4 4
wait "${agents[a]}"
unset "agents[a]"
"$venv/bin/python" - "$updates" <<'PYTHON'
import json, sys
from pathlib import Path

rows = [json.loads(line) for line in Path("outputs/elastic/metrics.jsonl").read_text().splitlines()]
found = [row["update"] for row in rows if "train/loss" in row]
assert found == list(range(1, int(sys.argv[1]) + 1)), (len(found), found[:3], found[-3:])
assert json.loads(Path("outputs/elastic/run.json").read_text())["state"] == "done"
PYTHON
cd / && "$venv/bin/accel-run" "${words[@]}" run=alone "output_root=$folder/outputs" >"$folder/alone.log" 2>&1
"$venv/bin/python" - "$folder" <<'PYTHON'
import json, sys
from pathlib import Path

def losses(name):
    rows = map(json.loads, (Path(sys.argv[1]) / "outputs" / name / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]

worst = max(abs(a - b) / abs(a) for a, b in zip(losses("alone"), losses("elastic"), strict=True))
print(f"ok      every update once; largest relative difference from one process: {worst:.1e}")
assert worst < 1e-9  # sums in another order differ by 1e-16, which grows over 1,500 updates
PYTHON
