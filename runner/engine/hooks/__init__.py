"""List the hooks, which run between updates, in order of execution. Each has its own file.

The order affects results: collectives inside hooks must match on all ranks, and a resumed run must do the same as an
uninterrupted one.
"""

from collections.abc import Sequence

from runner.engine.hooks.attribute_check import AttributeCheck
from runner.engine.hooks.averaging import Averaging
from runner.engine.hooks.bad_samples import BadSamples
from runner.engine.hooks.checkpointing import Checkpointing
from runner.engine.hooks.data_changes import DataChanges
from runner.engine.hooks.early_stopping import EarlyStopping
from runner.engine.hooks.evaluation import Evaluation
from runner.engine.hooks.first_update import FirstUpdate
from runner.engine.hooks.forward_state import ForwardState
from runner.engine.hooks.hook import Hook
from runner.engine.hooks.load_balance import LoadBalance
from runner.engine.hooks.metrics import Metrics
from runner.engine.hooks.nan_search import NanSearch
from runner.engine.hooks.oom import OutOfMemory
from runner.engine.hooks.optimizer_average import OptimizerAverage
from runner.engine.hooks.profiling import Profiling
from runner.engine.hooks.progress import ShowProgress
from runner.engine.hooks.rank_sync import RankSync
from runner.engine.hooks.stream_position import StreamPosition
from runner.engine.hooks.timekeeping import Timekeeping

HOOKS: Sequence[type[Hook]] = [
    DataChanges,  # rejects changed data before anything is computed with it
    StreamPosition,  # checks a stream before anything is computed with it, and notes what an update has read
    NanSearch,  # explains an update that is not finite before other hooks interpret its error
    OutOfMemory,  # knows the sizes of micro-batches, which evaluations need
    Metrics,  # writes the row of an update before hooks that react to the update write to the same file
    RankSync,  # merges the requests of hooks and ranks, on which the hooks below act
    BadSamples,  # lists bad samples before a checkpoint, because a run resumed from it does not read them again
    LoadBalance,  # compares the times that the ranks reported
    FirstUpdate,  # starts the tracker before progress is displayed or an evaluation runs
    ShowProgress,  # displays the loss of an update before its evaluation is printed
    # The hooks of the task file and of packages run here (custom.py): what they change counts as part of the update.
    ForwardState,  # records what an update has changed before evaluations and checkpoints rely on it
    AttributeCheck,  # restores buffers after its forward passes, including those that ForwardState has found
    Averaging,  # averages the weights before an evaluation uses the average
    OptimizerAverage,  # likewise, for the average that an optimizer keeps
    EarlyStopping,  # counts an evaluation before a checkpoint includes the count
    Evaluation,  # before Checkpointing: a checkpoint includes the evaluation of its update
    Checkpointing,  # after every hook with state, so that a checkpoint includes what each did after this update
    Timekeeping,  # records the times of all hooks above
    Profiling,  # ends the profile of an update after all other hooks
]
