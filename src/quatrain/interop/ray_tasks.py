"""The tasks of a preparation on a Ray cluster, with its retries; what they have done is finished here."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quatrain.errors import QuatrainError, UsageError
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.writer import Progress, Report, finish_tasks, prepare_task

RETRIES = 3  # of a task whose worker or machine has died; it goes on behind its last whole part
TASKS_A_CORE = 4  # so that a slow task at the end keeps few cores idle


def prepare_on_ray(
    sources: Sequence[str],
    out: Path,
    config: PrepareConfig,
    tasks: int = 0,
    report: Report = lambda line: None,
    progress: Progress = lambda phase, done, of: None,
) -> dict[str, Any]:
    """Prepare a store by tasks on Ray: byte for byte that of `prepare`.

    Joins the cluster that RAY_ADDRESS names, or starts Ray on this machine. Sources and `out` must be on a file system
    that every machine shares. `tasks` is their number (0: four for each core of the cluster). Raises as `prepare` does.
    """
    started = time.monotonic()
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs the library 'ray': pip install 'quatrain[ray]'") from error
    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING)
    try:
        resources: dict[str, float] = ray.cluster_resources()
        cores = max(1, int(resources.get("CPU", 1)))
        of = tasks or cores * TASKS_A_CORE
        remote = ray.remote(num_cpus=min(cores, config.workers), max_retries=RETRIES)(_quietly)
        absolute = [str(Path(source).resolve()) if Path(source).exists() else source for source in sources]
        waiting = [remote.remote(absolute, out.resolve(), config, (number, of)) for number in range(of)]
        report(f"{of} tasks on {cores} cores of Ray")
        done = 0
        while waiting:
            ready, waiting = ray.wait(waiting)
            for failure in ray.get(ready):
                if failure:
                    raise failure
            done += len(ready)
            progress("tasks on Ray", done, of)
    except ray.exceptions.RayError as error:
        raise QuatrainError(
            f"a task on Ray failed after {RETRIES} retries ({error}); the same command goes on"
        ) from error
    finally:
        ray.shutdown()
    summary = finish_tasks(sources, out, config, report, progress)
    return summary | {"seconds": round(time.monotonic() - started, 3)}


def _quietly(sources: list[str], out: Path, config: PrepareConfig, task: tuple[int, int]) -> QuatrainError | None:
    """Do a task; what is wrong with the input comes back as it is, for a retry would find the same."""
    try:
        prepare_task(sources, out, config, task)
    except QuatrainError as error:
        return error
    return None
