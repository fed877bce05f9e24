import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.support.no_skips import pytest_runtest_makereport

__all__ = ("pytest_runtest_makereport",)

# A runner in the background may have us ignore Ctrl-C, and so would every program that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, or its making, says how busy the machine is, and no test asks for that.
# CI sees the same examples each time, so that it says what a change did; elsewhere they are new ones.
settings.register_profile(
    "orchard", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("orchard")

# Folders whose tests share what a machine has once: a container engine's bridge, the users that tests make.
_TOGETHER = {"local_docker": "engine", "runtimes": "engine", "local_node": "users", "local_supervisor": "users"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, those of a file stay together: they share its fixtures."""
    for item in items:
        group = _TOGETHER.get(item.path.parent.name, item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
