"""One file per suite of `accel-run benchmark`, and the table of them.

A suite is a module with `OPTIONS`, its own key=value words and what they are when nobody says, and `run`, which takes
a Wanted and returns a Report. OPTIONS, and WORDS where a suite knows words besides, are literals: the completion of
shells reads them without importing what measures.
"""

# suite -> (module in runner.tools.measure.suites, what it answers)
SUITES: dict[str, tuple[str, str]] = {
    "ladder": ("ladder", "techniques, alone and on top of each other"),
    "machine": ("machine", "what the machine can do at most, and how near an update comes"),
    "batch": ("batch", "which micro-batch: samples per second by size"),
    "loader": ("loader", "which loader: workers, prefetch, pinned memory and cache, with what is waited for data"),
    "before_after": ("before_after", "plain settings against what the runner chooses: time, memory, inference"),
    "parallelism": ("parallelism", "one rank, equal shares, measured shares, pipeline; also beside a slow rank"),
    "devices": ("devices", "CPU against GPU, or threads: by phase and size, with the batch from which which is faster"),
}
