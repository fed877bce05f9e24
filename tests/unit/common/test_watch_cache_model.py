"""The cache of a consumer that moves between replicas of the watcher, each of which lags as it likes."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from orchard.watch.v1 import watch_service_pb2

from services.common.health import Health
from services.common.observed import Observed, to_proto
from services.common.states import State
from services.common.watch_cache import WatchCache, _Stream

Response = watch_service_pb2.WatchSandboxesResponse
REPLICAS = 3
# A runtime's revision, and the findings about it, as replicas number them.
STEPS = 4


def told(event: int) -> int:
    return event * STEPS


def complete(event: int) -> int:
    return event * STEPS + STEPS - 1


IDS = 3


def id_of(uid: str) -> str:
    """Few ids: each is had by one after the other."""
    return f"id-{int(uid[1:]) % IDS}"


@dataclass
class World:
    """What happened, in order: of each uid that it began, changed or ended."""

    history: list[tuple[str, State]] = field(default_factory=list)

    def begin(self) -> None:
        """The next sandbox begins, once the one that has its id has ended."""
        uid = f"u{len({one for one, _ in self.history})}"
        alive = self.states(len(self.history))
        for other in [one for one in alive if id_of(one) == id_of(uid)]:
            self.history.append((other, State.DELETED))
        self.history.append((uid, State.STARTING))

    def states(self, position: int) -> dict[str, tuple[int, State]]:
        """Revision and state of what was there after so many events."""
        found: dict[str, tuple[int, State]] = {}
        for number, (uid, state) in enumerate(self.history[:position], start=1):
            found[uid] = (told(number), state)
        return {uid: one for uid, one in found.items() if one[1] is not State.DELETED}

    def messages(self, old: int, new: int) -> list[Response]:
        """What a stream tells of the events between two positions: the newest of each sandbox, in their order."""
        newest = {uid: (told(number), state) for number, (uid, state) in list(enumerate(self.history, 1))[old:new]}
        batch = [message(uid, *one) for uid, one in sorted(newest.items(), key=lambda item: item[1])]
        if not batch:
            batch = [Response(bookmark=watch_service_pb2.Bookmark())]
        batch[-1].complete_revision = complete(new)
        return batch


def message(uid: str, revision: int, state: State) -> Response:
    return Response(sandbox=to_proto(Observed("t", id_of(uid), uid, revision, state), include_spec=False))


@dataclass
class Consumer:
    """The cache on one stream at a time, and what it told of."""

    cache: WatchCache
    told: list[Observed]
    stream: _Stream = field(default_factory=lambda: _Stream(0.0))
    replica: int = 0
    position: int = 0
    pending: list[Response] = field(default_factory=list)
    best: int = 0
    """Up to which revision it has known everything."""


def new_consumer() -> Consumer:
    changes: list[Observed] = []
    cache = WatchCache("unix:/nonexistent", Health(), include_spec=False, on_change=changes.append)
    return Consumer(cache, changes)


REPLICA = st.integers(0, REPLICAS - 1)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["begin", "change", "end"]), st.integers(0, 3), st.just(0)),
    # How many of the events that it has not seen a replica sees now, and of what is sent a consumer reads.
    st.tuples(st.sampled_from(["advance", "move"]), REPLICA, st.sampled_from([0, 1, 2, 100])),
    st.tuples(st.just("read"), st.just(0), st.sampled_from([1, 2, 100])),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, min_size=20, max_size=40), st.randoms(use_true_random=False))
def test_it_drops_what_ended_and_nothing_else(actions, rng) -> None:
    world, consumer, positions = World(), new_consumer(), [0] * REPLICAS
    for action, number, count in [("move", 0, 0), *actions]:
        alive = world.states(len(world.history)) if action in ("change", "end") else {}
        if action == "begin":
            world.begin()
        elif action in ("change", "end") and alive:
            uid = sorted(alive)[number % len(alive)]
            world.history.append((uid, State.READY if action == "change" else State.DELETED))
        elif action == "advance":
            positions[number] = min(positions[number] + count, len(world.history))
            if number == consumer.replica:
                consumer.pending += world.messages(consumer.position, positions[number])
                consumer.position = positions[number]
        elif action == "move":
            snapshot = [message(uid, *one) for uid, one in world.states(positions[number]).items()]
            rng.shuffle(snapshot)
            synced = Response(synced=watch_service_pb2.Synced(), complete_revision=complete(positions[number]))
            consumer.pending = [*snapshot, synced]
            consumer.stream, consumer.replica, consumer.position = _Stream(0.0), number, positions[number]
            read(world, consumer, count)
        elif action == "read":
            read(world, consumer, count)
    revisions: dict[str, int] = {}
    for seen in consumer.told:
        assert seen.revision > revisions.get(seen.uid, -1), "it went back"
        revisions[seen.uid] = seen.revision


def read(world: World, consumer: Consumer, count: int) -> None:
    alive = world.states(len(world.history))
    for response in consumer.pending[:count]:
        before = len(consumer.told)
        consumer.cache._take(consumer.stream, response)
        for seen in consumer.told[before:]:
            assert seen.state is not State.DELETED or seen.uid not in alive, "it dropped what lives"
        if consumer.stream.caught_up and response.complete_revision:
            consumer.best = max(consumer.best, response.complete_revision)
            if response.complete_revision < consumer.best:
                continue  # a replica that lags, and no sandbox that is known says so: the cache is ahead of it
            known = {seen.uid: seen.state for seen in consumer.cache.living()}
            there = world.states(response.complete_revision // STEPS)
            assert known == {uid: state for uid, (_, state) in there.items()}, "it is live and wrong"
            for uid in there:
                found = consumer.cache.get("t", id_of(uid))
                assert found is not None and found.uid == uid, "an id leads to one that had it before"
    del consumer.pending[:count]


def test_one_that_had_the_id_before_is_not_taken_for_its_successor() -> None:
    """A consumer that knows the second one alone moves to a replica that still tells of the first."""
    consumer = new_consumer()

    def told_by_a_stream(*responses: Response) -> None:
        stream = _Stream(0.0)
        for response in responses:
            consumer.cache._take(stream, response)

    def synced(event: int) -> Response:
        return Response(synced=watch_service_pb2.Synced(), complete_revision=complete(event))

    second = message("u3", told(5), State.READY)
    assert id_of("u0") == id_of("u3")
    told_by_a_stream(second, synced(5))
    late = (message("u0", told(4), State.DELETED), second)
    told_by_a_stream(message("u0", told(2), State.READY), synced(2), *late)
    found = consumer.cache.get("t", id_of("u3"))
    assert found is not None and (found.uid, found.state) == ("u3", State.READY)
