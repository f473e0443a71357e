"""One file per command of the command line, and the table of them."""

# command -> (module in runner.commands, what it does; nothing: not in the overview)
COMMANDS = {
    "train": ("train", "train a task; the same command with the same run=NAME resumes"),
    "resume": ("resume", "go on with a run that was stopped, from any folder"),
    "search": ("search", "search settings that are best by a metric, each tried by a training of its own"),
    "inference": ("inference", "predict with the newest checkpoint of a run (short: infer)"),
    "infer": ("inference", ""),
    "both": ("both", "train, then predict with what was trained"),
    "plan": ("plan", "show every derived value with its reason, and stop"),
    "explain": ("explain", "tell which file, profile or override set a value"),
    "runs": ("runs", "list the runs: task, state, updates, last metric, age, size"),
    "status": ("status", "show a run: progress, checkpoints, last error"),
    "report": ("report", "write a page about a run with its charts, or about several beside each other"),
    "monitor": ("monitor", "watch GPUs, CPU, RAM and who uses them, live or of a run"),
    "profile": ("profile", "show what an update is made of: operators, modules, memory, waits"),
    "advise": ("advise", "find what would make a run faster, and try it before saying so"),
    "benchmark": ("benchmark", "measure what techniques gain on this machine, each against the baseline in turns"),
    "tune": ("tune", "find the settings that are fastest here, and write them as a hardware profile"),
    "doctor": ("doctor", "try what training needs on this machine, and say what to change"),
    "export": ("export", "write the model of a run as safetensors, torch.export program and ONNX, each checked"),
    "import": ("import_", "make a safetensors file of somebody's .pt, without running what it holds"),
    "new": ("new", "write a one-file task of your own"),
    "completion": ("completion", "print what makes bash, zsh or fish complete these words"),
    "complete": ("complete", ""),
}

# those that compute: a terminal or a pipe whose reader has stopped does not hold them, and misses what does not fit;
# all others wait for their reader, as `accel-run runs | less` expects
TRAINING = frozenset(
    {"train", "resume", "search", "inference", "infer", "both", "profile", "advise", "benchmark", "tune"}
)
