"""Build the task of a strategy that divides the model: without its large tensors, if the task allows it."""

from __future__ import annotations

from collections.abc import Collection

from runner.base.errors import AccelRunError, ConfigError, Problem
from runner.base.global_rng import seed_everything
from runner.base.task import Task
from runner.base.world import World
from runner.distributed.deferred_init import DeferredInit
from runner.distributed.parallel import Parallel
from runner.engine.task_loading import load_task
from runner.plan.run_plan import Plan


def build_task(plan: Plan, parallel: Parallel, world: World, loaded: Collection[str]) -> tuple[Task, list[str]]:
    """Seed the generators and build the task; return it with notes for the start report. A collective.

    loaded  names of tensors of the model that a checkpoint will replace

    Raises ConfigError with parallelism.init=meta if the task needs the values of its tensors to be built.
    """
    seed_everything(plan.settings.seed)
    if parallel.init == "full":
        return load_task(plan), []
    recording, task, why_not = DeferredInit(), None, ""
    try:
        with recording:
            task = load_task(plan)
        recording.replace_leaked(task.model)
    except Exception as error:  # an error that is not caused by deferred tensors is raised again below
        why_not = error.problems[0].what if isinstance(error, AccelRunError) else (str(error) or type(error).__name__)
        why_not = f"building it without memory failed: {why_not.splitlines()[0]}"
    results = world.gather([why_not, recording.digest()])
    why_not = next((reason for reason, _ in results if reason), "")
    if not why_not and any(result != results[0] for result in results):
        why_not = "its construction differs between ranks"
    if task is not None and not why_not:
        from runner.distributed.shard_init import DeferredModel  # imports DTensors, which are slow to import

        parallel.deferred = DeferredModel(recording, loaded)
        return task, []
    if parallel.init == "meta":
        what = f"the model cannot be built without memory: {why_not}"
        raise ConfigError(Problem(what, "parallelism.init=meta", "use parallelism.init=auto or full"))
    del recording, task
    seed_everything(plan.settings.seed)
    return load_task(plan), [f"each rank builds the whole model first: {why_not}"]
