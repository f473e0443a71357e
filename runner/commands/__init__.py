"""One file per command of the command line, and the table of them."""

# command -> (module in runner.commands, summary); a command without a summary is not in the overview
COMMANDS = {
    "train": ("train", "train a task; the same command with the same run=NAME resumes"),
    "resume": ("resume", "resume a stopped run, from any folder"),
    "search": ("search", "search for the settings that give the best metric; each trial is a separate run"),
    "inference": ("inference", "predict with the best or another checkpoint of a run (short: infer)"),
    "infer": ("inference", ""),
    "evaluate": ("evaluate_run", "compute the metrics of a trained run on a split, such as split=test"),
    "both": ("both", "train, then predict with the trained model"),
    "plan": ("plan", "show every setting with its reason, without training"),
    "explain": ("explain", "show which file, profile or override set a value"),
    "runs": ("runs", "list the runs: task, state, updates, last metric, age, size"),
    "status": ("status", "show a run: progress, checkpoints, last error"),
    "report": ("report", "write an HTML report of a run, or compare several"),
    "monitor": ("monitor", "monitor GPUs, CPU, RAM and processes, live or for a past run"),
    "profile": ("profile", "profile an update: operators, modules, memory, synchronizations"),
    "advise": ("advise", "find settings that make a run faster, verified by measurement"),
    "benchmark": ("benchmark", "measure the speedup of techniques on this machine, interleaved with the baseline"),
    "tune": ("tune", "find the fastest settings for this machine and save them as a hardware profile"),
    "doctor": ("doctor", "check this machine for everything training needs, and suggest fixes"),
    "export": ("export", "export the model of a run as safetensors, a torch.export program and ONNX, each verified"),
    "import": ("import_", "convert an untrusted .pt file to safetensors without executing it"),
    "new": ("new", "write a one-file task template"),
    "completion": ("completion", "print the shell completion script for bash, zsh or fish"),
    "complete": ("complete", ""),
}

# Names of other tools' commands -> what to use instead
FOREIGN_NAMES = {
    **dict.fromkeys(("fit", "run", "start", "launch"), "use accel-run train"),
    **dict.fromkeys(("validate", "validation", "val", "eval"), "use accel-run evaluate"),
    "test": "use accel-run evaluate split=test",
    **dict.fromkeys(("predict", "generate", "sample"), "use accel-run inference"),
    **dict.fromkeys(
        ("sweep", "multirun"),
        "use accel-run train -m for every combination of values, or accel-run search to find the best one",
    ),
    **dict.fromkeys(("optimize", "hpo"), "use accel-run search"),
    **dict.fromkeys(("continue", "restart"), "use accel-run resume"),
    **dict.fromkeys(("compare", "diff"), "use accel-run report RUN OTHER_RUN"),
    **dict.fromkeys(("list", "ls", "ps"), "use accel-run runs"),
    **dict.fromkeys(("show", "info", "inspect"), "use accel-run status"),
    **dict.fromkeys(("log", "logs", "tail"), "use accel-run status, or read console.log in the folder of the run"),
    **dict.fromkeys(("config", "print_config", "settings"), "use accel-run plan, which shows every setting"),
    **dict.fromkeys(("env", "check", "diagnose"), "use accel-run doctor"),
    **dict.fromkeys(("init", "create"), "use accel-run new"),
    **dict.fromkeys(("top", "gpustat", "nvidia-smi"), "use accel-run monitor"),
    **dict.fromkeys(("delete", "remove", "rm", "clean"), "delete the folder of the run, such as outputs/NAME"),
    **dict.fromkeys(("stop", "kill", "cancel"), "press Ctrl-C or send SIGTERM to the process: the run is saved"),
    "version": "use accel-run --version",
}

# Commands that compute. They never block on output: if a pipe or terminal is not read and its buffer is full,
# output is dropped.
# All other commands wait for the reader, as `accel-run runs | less` expects.
TRAINING = frozenset(
    {"train", "resume", "search", "inference", "infer", "evaluate", "both", "profile", "advise", "benchmark", "tune"}
)
# Commands whose runs save and stop on a signal. If SIGUSR1 ends a run before it can handle the signal, the SLURM job
# script requeues it.
RESUMABLE = frozenset({"train", "resume", "search", "both"})
