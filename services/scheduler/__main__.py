"""`python -m services.scheduler`: settings come from the environment (settings.py)."""

import sys

from services.common.process import run_service
from services.scheduler.app import run
from services.scheduler.settings import SchedulerSettings

if __name__ == "__main__":
    sys.exit(run_service("scheduler", SchedulerSettings, run))
