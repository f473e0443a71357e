"""Everything between updates, one file each; the order below is part of what a run computes.

Collectives inside hooks must match on all ranks, and a resumed run must do the same in the same order:

    DataChanges    refuses other data before anything is computed with it
    NanSearch      explains an update that was not finite, before anything else is asked of its error
    OutOfMemory    knows the sizes of micro-batches, which evaluations need
    Metrics        keeps the update before a decision about it is written into the same file
    RankSync       agrees on what all hooks want; all below act on it
    BadSamples     lists what the ranks reported, before a checkpoint that does not read these samples again
    LoadBalance    compares the times the ranks reported
    FirstUpdate    starts the tracker before anything is drawn or evaluated
    Progress       draws the update before its evaluation is printed
    EarlyStopping  counts an evaluation before a checkpoint is made of it, and reports an early end before the last one
    Evaluation     before Checkpointing: a checkpoint includes the evaluation of its update
    Checkpointing  after every hook with a state: a resumed run would lack what it did after this update
    Timekeeping    accounts for everything above
    Profiling      ends the record of an update after everything that belongs to it
"""

from runner.engine.hooks.bad_samples import BadSamples
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.data_changes import DataChanges
from runner.engine.hooks.early_stopping import EarlyStopping
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.first_update import FirstUpdate
from runner.engine.hooks.hook import Hook
from runner.engine.hooks.load_balance import LoadBalance
from runner.engine.hooks.metrics import Metrics
from runner.engine.hooks.nan_search import NanSearch
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.hooks.profiling import Profiling
from runner.engine.hooks.progress import Progress
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.hooks.timekeeping import Timekeeping

HOOKS: tuple[type[Hook], ...] = (
    DataChanges,
    NanSearch,
    OutOfMemory,
    Metrics,
    RankSync,
    BadSamples,
    LoadBalance,
    FirstUpdate,
    Progress,
    EarlyStopping,
    Evaluation,
    Checkpointing,
    Timekeeping,
    Profiling,
)
