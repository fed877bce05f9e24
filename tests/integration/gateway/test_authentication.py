"""Whose call it is: by the API keys of a real PostgreSQL, at little cost whatever is shown as a key."""

import asyncio
from datetime import timedelta

import psycopg
import pytest
from orchard.admin.v1 import key_service_pb2

from services.common.db import connect
from services.common.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from services.common.health import Health
from services.common.pages import encode_token
from services.gateway.keys import Keys
from services.gateway.servicer import KeyServicer
from services.gateway.store import GatewayStore, utc_now
from tests.integration.gateway.callers import bearer
from tests.integration.gateway.locks import held_up, waiting_for_locks

BACKSTOP = 110
USER_METHOD = "/orchard.sandbox.v1.SandboxService/GetSandbox"
ADMIN_METHOD = "/orchard.admin.v1.KeyService/CreateKey"


class SlowStore(GatewayStore):
    """A store whose answer to a read can be held up."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.hold = False
        self.was_read = asyncio.Event()
        self.go_on = asyncio.Event()
        self.loses_answers = False

    async def working_keys(self, now):
        keys = await super().working_keys(now)
        if self.hold:
            self.was_read.set()
            await self.go_on.wait()
        return keys

    async def revoke_key(self, key_id, now, tenant=""):
        key = await super().revoke_key(key_id, now, tenant)
        if self.loses_answers:
            raise UnavailableError("the connection broke as it was committed")
        return key


class TestKeys:
    async def test_a_key_opens_its_tenant_and_is_stored_hashed(self, store: GatewayStore, database: str) -> None:
        _key, secret = await Keys(store, Health()).create("acme", "mine", frozenset({"user"}), None)
        principal = await Keys(store, Health()).authenticate(USER_METHOD, bearer(secret))
        assert (principal.tenant, principal.roles) == ("acme", frozenset({"user"}))
        with psycopg.connect(database) as connection:
            stored = repr(connection.execute("SELECT * FROM gateway.api_keys").fetchall())
        assert secret.split("_", 2)[2] not in stored

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda s: s[:-1],
            lambda s: s + "x",
            lambda s: "ork_" + s[4:].swapcase(),
            lambda s: s.replace("ork_", "orx_"),
            lambda s: "",
            lambda s: "ork__",
            lambda s: "é",
        ],
    )
    async def test_what_is_not_the_key_is_refused(self, store: GatewayStore, spoil) -> None:
        keys = Keys(store, Health())
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(spoil(secret)))

    @pytest.mark.parametrize(
        "metadata", [{}, {"authorization": ""}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}]
    )
    async def test_no_key_says_how_to_send_one(self, store: GatewayStore, metadata: dict[str, str]) -> None:
        with pytest.raises(UnauthenticatedError, match="authorization: Bearer"):
            await Keys(store, Health()).authenticate(USER_METHOD, metadata)

    async def test_a_revoked_key_stops_at_once_here(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        first = await keys.revoke(key.key_id)
        assert (await keys.revoke(key.key_id)).revoke_time == first.revoke_time
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))
        with pytest.raises(NotFoundError):
            await keys.revoke("none")

    async def test_keys_that_were_read_before_a_revoke_do_not_bring_the_key_back(self, database: str) -> None:
        slow = SlowStore(connect(database))
        keys = Keys(slow, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        slow.hold = True
        refresh = asyncio.ensure_future(keys.refresh())
        await asyncio.wait_for(slow.was_read.wait(), BACKSTOP)
        await keys.revoke(key.key_id)
        slow.hold = False
        slow.go_on.set()
        await asyncio.wait_for(refresh, BACKSTOP)
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))
        await slow.close()

    async def test_keys_that_were_read_before_a_key_was_made_do_not_take_it_away(self, database: str) -> None:
        slow = SlowStore(connect(database))
        keys = Keys(slow, Health())
        slow.hold = True
        refresh = asyncio.ensure_future(keys.refresh())
        await asyncio.wait_for(slow.was_read.wait(), BACKSTOP)
        _key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        slow.hold = False
        slow.go_on.set()
        await asyncio.wait_for(refresh, BACKSTOP)
        async with held_up(database, "gateway.api_keys"):
            # Known keys go on working whatever becomes of the database.
            assert await asyncio.wait_for(keys.authenticate(USER_METHOD, bearer(secret)), BACKSTOP)
        await slow.close()

    @pytest.mark.parametrize(("whose", "stops"), [("", True), ("acme", True), ("other", False)])
    async def test_a_revoke_whose_answer_was_lost_stops_the_key_at_once_too(
        self, database: str, whose: str, stops: bool
    ) -> None:
        losing = SlowStore(connect(database))
        keys = Keys(losing, Health())
        key, secret = await keys.create("acme", "", frozenset({"user"}), None)
        losing.loses_answers = True
        with pytest.raises(UnavailableError):
            await keys.revoke(key.key_id, whose)
        if stops:
            with pytest.raises(UnauthenticatedError):
                await keys.authenticate(USER_METHOD, bearer(secret))
        else:
            async with held_up(database, "gateway.api_keys"):
                assert await asyncio.wait_for(keys.authenticate(USER_METHOD, bearer(secret)), BACKSTOP)
        await losing.close()

    async def test_a_token_with_an_impossible_time_is_named(self, store: GatewayStore) -> None:
        request = key_service_pb2.ListKeysRequest(page_token=encode_token((10**30, "x")))
        with pytest.raises(InvalidArgumentError, match="page_token"):
            await KeyServicer(Keys(store, Health())).ListKeys(request, None)

    async def test_an_expired_key_is_refused(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        _key, secret = await keys.create("acme", "", frozenset({"user"}), timedelta(microseconds=1))
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(secret))

    async def test_roles_are_checked_before_anything_is_looked_for(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        _key, user = await keys.create("acme", "", frozenset({"user"}), None)
        _key, admin = await keys.create("acme", "", frozenset({"admin"}), None)
        with pytest.raises(PermissionDeniedError):
            await keys.authenticate(ADMIN_METHOD, bearer(user))
        assert await keys.authenticate(ADMIN_METHOD, bearer(admin))

    async def test_pages(self, store: GatewayStore) -> None:
        keys = Keys(store, Health())
        made = [(await keys.create("acme", str(n), frozenset({"user"}), None))[0].key_id for n in range(5)]
        await keys.create("other", "", frozenset({"user"}), None)
        found, before = [], None
        while page := await keys.list_page("acme", before, 2):
            found += [key.key_id for key in page]
            before = (page[-1].create_time, page[-1].key_id)
        assert found == made[::-1]


async def test_made_up_keys_hold_up_nobody(store: GatewayStore, database: str) -> None:
    keys = Keys(store, Health(), look_ups=2)
    _key, known = await keys.create("acme", "", frozenset({"user"}), None)
    _other, elsewhere = await Keys(store, Health()).create("acme", "", frozenset({"user"}), None)
    made_up = [f"ork_{number:012x}_x" for number in range(150)]
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as watching:
        async with held_up(database, "gateway.api_keys"):
            calls = [asyncio.ensure_future(keys.authenticate(USER_METHOD, bearer(key))) for key in made_up]
            while len(waiting := await waiting_for_locks(watching)) < 2:
                pass
            # The others of the pool's connections are free, and so is who has a key.
            assert len(waiting) == 2
            await asyncio.gather(*(store.sum_usage("acme", None, utc_now(), "") for _ in range(20)))
            assert len(await waiting_for_locks(watching)) == 2
            await keys.authenticate(USER_METHOD, bearer(known))
            refused = [call.exception() for call in calls if call.done()]
            assert {type(error) for error in refused} == {UnavailableError}
            assert len(refused) == 50
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(end, UnauthenticatedError) for end in ends) == 100
    # A key that was made on another gateway is found once there is room.
    await keys.authenticate(USER_METHOD, bearer(elsewhere))


async def test_an_unknown_key_is_looked_up_once_however_often_it_is_shown(store: GatewayStore) -> None:
    class Counting(GatewayStore):
        asked = 0

        async def find_key(self, key_id):
            self.asked += 1
            return await super().find_key(key_id)

    counting = Counting(store._engine)
    keys = Keys(counting, Health())
    calls = [keys.authenticate(USER_METHOD, bearer("ork_0123456789ab_x")) for _ in range(50)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {UnauthenticatedError}
    assert counting.asked <= 2
    for other in ("ork_0123456789AB_x", "ork_0123_x", f"ork_{'0' * 64}_x"):  # no key's id looks like this
        with pytest.raises(UnauthenticatedError):
            await keys.authenticate(USER_METHOD, bearer(other))
    assert counting.asked <= 2
