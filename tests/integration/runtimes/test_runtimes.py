"""The suite that every runtime must pass, on one machine."""

from tests.support.runtime_suite import *  # noqa: F403
