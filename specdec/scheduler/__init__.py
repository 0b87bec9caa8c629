"""Who runs in the next step, how many prompt rows and draft nodes each gets, and who waits."""

from specdec.scheduler.limits import SchedulerLimits
from specdec.scheduler.plan_entry import PlanEntry
from specdec.scheduler.scheduler import Scheduler
from specdec.scheduler.step_plan import StepPlan

__all__ = ["PlanEntry", "Scheduler", "SchedulerLimits", "StepPlan"]
