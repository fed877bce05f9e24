"""Commands that mean no good, on one machine."""

from tests.support.hostile_suite import *  # noqa: F403
