"""The scheduler of a file in place of the milestone's own (`EngineConfig.scheduler`)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TypeVar, cast

from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler

from .own_code import own_class

SchedulerType = TypeVar("SchedulerType", bound=BaseScheduler)


def scheduler_class(path: str | None, default: type[SchedulerType]) -> type[SchedulerType]:
    """The class of the scheduler in a file; without a file, the milestone's own.

    Args:
        default: the milestone's. Both are made with the same arguments.

    Raises:
        InputError: the file cannot be read, has no scheduler, or one of another milestone.
        Exception: what the file itself raises.
    """
    if path is None:
        return default
    own = own_class(Path(path), "Scheduler", BaseScheduler)
    wanted, taken = (", ".join(inspect.signature(each).parameters) for each in (default, own))
    if taken != wanted:
        raise InputError(
            f"{path}: {own.__name__} is made of ({taken}), but the scheduler of "
            f"{default.__module__.partition('.')[0]} of ({wanted}): it is of another milestone"
        )
    return cast("type[SchedulerType]", own)
