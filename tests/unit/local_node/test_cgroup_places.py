"""Where the groups of version 2 are made, and whose end a kernel's log tells."""

from pathlib import Path

import pytest

from services.local.runtime.cgroups import top_of
from services.local.runtime.linux import killed_since

LOG = """\
<6>[   12.000001] usb 1-1: new device
<4>[  100.500000] Out of memory: Killed process 321 (python) total-vm:1kB
[  200.000000] Memory cgroup out of memory: Killed process 4321 (sh) total-vm:1kB
<4>Out of memory: Killed process 99 (old)
"""


def test_a_node_that_is_started_again_makes_its_groups_where_it_made_them_before() -> None:
    own = Path("/sys/fs/cgroup/user.slice/run-1.scope")
    assert top_of(own, "orchard-abc") == own
    assert top_of(own / "orchard-abc-platform", "orchard-abc") == own
    assert top_of(own / "orchard-other-platform", "orchard-abc") == own / "orchard-other-platform"


@pytest.mark.parametrize(
    ("pid", "since", "told"),
    [
        (321, 50.0, True),
        (321, 100.5, True),
        (321, 100.6, False),
        (4321, 150.0, True),
        (21, 0.0, False),
        (432, 0.0, False),
        (99, 1e9, True),
    ],
)
def test_an_end_by_lack_of_memory_is_of_this_process_and_not_of_an_earlier_one(
    pid: int, since: float, told: bool
) -> None:
    assert killed_since(LOG, pid, since) is told
