import os
import pwd
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.local_node.harness import Account, NodeProcess

_TEST_USER = "orchard-test"
_PLAIN_UID = 65533
LEVELS = ("shifted", "subids", "single")


def account_for(level: str) -> Account | None:
    """Who runs a daemon that gets this level; None where only another user could."""
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid()) if level == own_level() else None
    if level == "shifted":
        return Account(0, 0)
    if level == "single":
        return Account(_PLAIN_UID, _PLAIN_UID)
    entry = _user_with_sub_ids()
    return Account(entry.pw_uid, entry.pw_gid)


def own_level() -> str:
    has_tools = shutil.which("newuidmap") and shutil.which("newgidmap")
    names = {line.split(":")[0] for line in Path("/etc/subuid").read_text().splitlines()}
    mine = {str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name}
    return "subids" if has_tools and names & mine else "single"


def _user_with_sub_ids() -> pwd.struct_passwd:
    assert shutil.which("newuidmap"), "install the package uidmap: the level subids is tested too"
    try:
        entry = pwd.getpwnam(_TEST_USER)
    except KeyError:
        subprocess.run(
            ["useradd", "--no-create-home", "--home-dir", "/nonexistent", _TEST_USER], check=True, timeout=110
        )
        entry = pwd.getpwnam(_TEST_USER)
    for path in (Path("/etc/subuid"), Path("/etc/subgid")):
        text = path.read_text()
        if f"{_TEST_USER}:" not in text:
            path.write_text(f"{text}{_TEST_USER}:2000000:65536\n")
    return entry


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if account_for(request.param) is None:
        pytest.skip(f"level {request.param} needs another user: run the suite as root")
    return str(request.param)


@pytest.fixture
async def make_node() -> AsyncIterator[Callable[..., NodeProcess]]:
    """Makes daemons; stops them and checks that nothing is left."""
    async with AsyncExitStack() as stack:

        def make(level: str = "", **settings: str) -> NodeProcess:
            node = NodeProcess(account_for(level or default_level()), settings)
            stack.push_async_callback(node.close)
            return node

        yield make


def default_level() -> str:
    return "shifted" if os.geteuid() == 0 else own_level()


@pytest.fixture
async def node(make_node: Callable[..., NodeProcess]) -> NodeProcess:
    """A daemon of the best level that this user can have."""
    node = make_node()
    await node.start()
    return node


@pytest.fixture
async def leveled(make_node: Callable[..., NodeProcess], level: str) -> NodeProcess:
    """A daemon of each level in turn."""
    node = make_node(level)
    await node.start()
    return node


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[NodeProcess]:
    """A daemon of each level, for tests that leave it as it was."""
    account = account_for(request.param)
    if account is None:
        pytest.skip(f"level {request.param} needs another user: run the suite as root")
    node = NodeProcess(account, {})
    try:
        await node.start()
        assert (await node.describe()).user_ids == request.param
        yield node
    finally:
        await node.close()
