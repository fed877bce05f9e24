"""The suite that every runtime must pass, on one machine; tests/cluster/platform runs it against Pods."""

from tests.support.runtime_suite import *  # noqa: F403
