"""What running a command means, on one machine."""

from tests.support.exec_suite import *  # noqa: F403
