"""`python -m services.watcher`: settings come from the environment (settings.py)."""

import sys

from services.common.process import run_service
from services.watcher.app import run
from services.watcher.settings import WatcherSettings

if __name__ == "__main__":
    sys.exit(run_service("watcher", WatcherSettings, run))
