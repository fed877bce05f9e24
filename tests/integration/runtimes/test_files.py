"""What moving a file means, on one machine."""

from tests.support.file_suite import *  # noqa: F403
