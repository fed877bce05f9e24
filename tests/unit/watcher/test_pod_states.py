"""What Pods in every condition are to the watcher, in the forms of kubelet, scheduler and controllers of 1.34."""

from datetime import datetime
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.states import Reason, State
from services.watcher.pod_lines import BrokenBodyError
from services.watcher.pod_states import project

MADE = "2026-11-29T18:50:01Z"
MADE_MS = int(datetime.fromisoformat(MADE).timestamp() * 1000)
SPEC = sandbox_pb2.SandboxSpec(image="i", start_timeout=Duration(seconds=60), pull_timeout=Duration(seconds=300))
SCHEDULED = {"type": "PodScheduled", "status": "True"}


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "uid": "u1",
            "resourceVersion": "77",
            "creationTimestamp": MADE,
            "annotations": {
                pods.TENANT: "t",
                pods.SANDBOX_ID: "sb",
                pods.REQUEST_ID: "r",
                pods.SPEC_HASH: "h",
                pods.SPEC: pods.encode_spec(SPEC.SerializeToString()),
                pods.CREATE_MS: "1795978000123",
                pods.EXPIRE_MS: "1796064400123",
            },
            **metadata,
        },
        "status": status,
    }


def started(**status: Any) -> dict[str, Any]:
    return {"phase": "Pending", "startTime": MADE, "conditions": [SCHEDULED], **status}


def container(name: str = pods.CONTAINER, **state: Any) -> dict[str, Any]:
    return {"name": name, "image": "reg.example/i:1", "state": state}


def waiting(reason: str, message: str = "", name: str = pods.CONTAINER) -> dict[str, Any]:
    return container(name, waiting={"reason": reason, "message": message})


def ended(code: int, reason: str = "Error", name: str = pods.CONTAINER, **more: Any) -> dict[str, Any]:
    return container(name, terminated={"exitCode": code, "reason": reason, **more})


def disrupted(reason: str, message: str = "") -> dict[str, Any]:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}


RUNNING = container(running={"startedAt": MADE})


def test_every_field_that_consumers_need() -> None:
    seen = project(pod(started(phase="Running", podIP="10.1.2.3", containerStatuses=[RUNNING])), complete_revision=78)
    one = seen.observed
    assert (one.tenant, one.sandbox_id, one.uid, one.revision, one.request_id, one.spec_hash) == (
        *("t", "sb", "u1", 77),
        *("r", "h"),
    )
    assert (one.create_ms, one.expire_ms, one.ready_ms) == (1795978000123, 1796064400123, 0)
    assert one.spec == SPEC.SerializeToString()
    assert (one.state, one.endpoint, one.reason) == (State.STARTING, "10.1.2.3:7070", Reason.UNSPECIFIED)
    assert (seen.start_timeout_seconds, seen.running, seen.give_up, seen.complete_revision) == (60, True, None, 78)


def test_an_address_of_version_6_is_in_brackets() -> None:
    seen = project(pod(started(podIP="fd00::7", containerStatuses=[RUNNING])))
    assert seen.observed.endpoint == "[fd00::7]:7070"


def test_a_pod_made_before_the_time_of_its_create_was_noted_has_its_own() -> None:
    made = pod(started())
    del made["metadata"]["annotations"][pods.CREATE_MS]
    assert project(made).observed.create_ms == MADE_MS


@pytest.mark.parametrize(
    ("status", "reason", "said", "seconds", "end"),
    [
        ({"phase": "Pending"}, Reason.UNSPECIFIED, "waits for a node", 60, Reason.UNSCHEDULABLE),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available:\n 3 Insufficient cpu.",
                    }
                ],
            },
            Reason.UNSCHEDULABLE,
            "0/3 nodes are available: 3 Insufficient cpu.",
            60,
            Reason.UNSCHEDULABLE,
        ),
        (started(), Reason.UNSPECIFIED, "being made", 360, Reason.AGENT_START),
        (
            started(containerStatuses=[waiting("ContainerCreating")]),
            Reason.UNSPECIFIED,
            "being pulled",
            360,
            Reason.AGENT_START,
        ),
        (
            started(
                initContainerStatuses=[RUNNING | {"name": "agent"}], containerStatuses=[waiting("PodInitializing")]
            ),
            Reason.UNSPECIFIED,
            "being made",
            360,
            Reason.AGENT_START,
        ),
        (
            started(containerStatuses=[waiting("ErrImagePull", "not found")]),
            Reason.IMAGE_PULL,
            "'reg.example/i:1' cannot be pulled yet: ErrImagePull: not found",
            300,
            Reason.IMAGE_PULL,
        ),
        (
            started(containerStatuses=[waiting("ImagePullBackOff", "Back-off pulling image")]),
            Reason.IMAGE_PULL,
            "Back-off pulling image",
            300,
            Reason.IMAGE_PULL,
        ),
        (
            started(
                initContainerStatuses=[waiting("ImagePullBackOff", "denied", "agent")],
                containerStatuses=[waiting("PodInitializing")],
            ),
            Reason.IMAGE_PULL,
            "denied",
            300,
            Reason.IMAGE_PULL,
        ),
        (
            started(containerStatuses=[waiting("CreateContainerConfigError", "secret not found")]),
            Reason.AGENT_START,
            "CreateContainerConfigError: secret not found",
            360,
            Reason.AGENT_START,
        ),
        (started(containerStatuses=[RUNNING]), Reason.UNSPECIFIED, "being made", 360, Reason.AGENT_START),
    ],
)
def test_a_start_says_what_it_waits_for_and_when_it_is_given_up(
    status: dict[str, Any], reason: Reason, said: str, seconds: int, end: Reason
) -> None:
    seen = project(pod(status))
    assert (seen.observed.state, seen.observed.reason, seen.observed.endpoint) == (State.STARTING, reason, "")
    assert said in seen.observed.message
    assert seen.give_up is not None
    assert (seen.give_up.at_ms, seen.give_up.reason) == (MADE_MS + seconds * 1000, end)
    assert seen.give_up.message


def test_an_agent_is_asked_as_soon_as_there_is_an_address_but_not_where_it_cannot_start() -> None:
    early = project(pod(started(podIP="10.1.2.3", containerStatuses=[waiting("ContainerCreating")])))
    assert (early.observed.endpoint, early.running) == ("10.1.2.3:7070", False)
    assert early.give_up is not None
    stuck = project(pod(started(podIP="10.1.2.3", containerStatuses=[waiting("ImagePullBackOff")])))
    assert (stuck.observed.endpoint, stuck.running) == ("", False)


FAILED = {"phase": "Failed", "startTime": MADE}


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (started(containerStatuses=[waiting("InvalidImageName", "cannot parse")]), Reason.IMAGE_PULL, "cannot parse"),
        (started(containerStatuses=[waiting("ErrImageNeverPull", "not present")]), Reason.IMAGE_PULL, "not present"),
        ({**FAILED, "containerStatuses": [ended(137, "OOMKilled")]}, Reason.OOM, "out of memory"),
        (started(phase="Running", containerStatuses=[ended(137, "OOMKilled")]), Reason.OOM, "out of memory"),
        (
            {**FAILED, "initContainerStatuses": [ended(137, "OOMKilled", "agent")]},
            Reason.OOM,
            "'agent' ran out of memory",
        ),
        (
            {**FAILED, "containerStatuses": [ended(3, message="no payload")]},
            Reason.AGENT_START,
            "exit code 3: no payload",
        ),
        (
            {**FAILED, "containerStatuses": [ended(128, "StartError", message="exec: not found")]},
            Reason.AGENT_START,
            "exit code 128 (StartError): exec: not found",
        ),
        (
            {"phase": "Succeeded", "startTime": MADE, "containerStatuses": [ended(0, "Completed")]},
            Reason.AGENT_START,
            "exit code 0 (Completed)",
        ),
        (
            {
                **FAILED,
                "initContainerStatuses": [ended(1, name="agent")],
                "containerStatuses": [waiting("PodInitializing")],
            },
            Reason.AGENT_START,
            "'agent' ended with exit code 1",
        ),
        ({**FAILED, "containerStatuses": [ended(0, signal=9)]}, Reason.AGENT_START, "signal 9"),
        (
            {**FAILED, "reason": "Evicted", "message": "The node was low on resource: memory."},
            Reason.EVICTED,
            "low on resource",
        ),
        (
            {
                **FAILED,
                "reason": "Evicted",
                "message": "Usage of EmptyDir volume exceeds the limit",
                "conditions": [disrupted("TerminationByKubelet")],
                "containerStatuses": [ended(137)],
            },
            Reason.EVICTED,
            "exceeds the limit",
        ),
        ({**FAILED, "reason": "DeadlineExceeded", "message": "active on the node longer"}, Reason.EXPIRED, "longer"),
        ({**FAILED, "reason": "Terminated", "message": "imminent node shutdown"}, Reason.NODE_LOST, "shutdown"),
        ({**FAILED, "reason": "OutOfcpu", "message": "Node didn't have enough"}, Reason.UNSCHEDULABLE, "OutOfcpu"),
        ({**FAILED, "reason": "UnexpectedAdmissionError"}, Reason.UNSCHEDULABLE, "UnexpectedAdmissionError"),
        (
            {**FAILED, "containerStatuses": [ended(137, "ContainerStatusUnknown", message="could not be located")]},
            Reason.NODE_LOST,
            "could not be located",
        ),
        (
            {**FAILED, "conditions": [disrupted("DeletionByPodGC", "node not found")]},
            Reason.NODE_LOST,
            "node not found",
        ),
        ({**FAILED}, Reason.AGENT_START, "its Pod ended: Failed"),
    ],
)
def test_an_end_says_why(status: dict[str, Any], reason: Reason, said: str) -> None:
    seen = project(pod(status))
    assert (seen.observed.state, seen.observed.reason, seen.observed.endpoint) == (State.FAILED, reason, "")
    assert said in seen.observed.message
    assert seen.give_up is None


LEAVING = {"deletionTimestamp": MADE}


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        (started(phase="Running", podIP="10.1.2.3", containerStatuses=[RUNNING]), State.DELETING, Reason.UNSPECIFIED),
        ({**FAILED, "containerStatuses": [ended(143)]}, State.DELETING, Reason.UNSPECIFIED),
        (started(conditions=[disrupted("DeletionByTaintManager")]), State.FAILED, Reason.NODE_LOST),
        (started(conditions=[disrupted("EvictionByEvictionAPI")]), State.FAILED, Reason.EVICTED),
        (started(conditions=[disrupted("PreemptionByScheduler")]), State.FAILED, Reason.EVICTED),
        (started(reason="NodeLost"), State.FAILED, Reason.NODE_LOST),
    ],
)
def test_one_that_is_being_removed_is_not_routable(status: dict[str, Any], state: State, reason: Reason) -> None:
    one = project(pod(status, **LEAVING)).observed
    assert (one.state, one.reason, one.endpoint) == (state, reason, "")
    gone = project(pod(status, **LEAVING), removed=True).observed
    assert (gone.state, gone.reason, gone.endpoint) == (State.DELETED, reason, "")


def test_a_disruption_that_was_taken_back_or_not_carried_out_is_none() -> None:
    running = {"phase": "Running", "podIP": "10.1.2.3", "containerStatuses": [RUNNING]}
    announced = started(conditions=[disrupted("PreemptionByScheduler")], **running)
    assert project(pod(announced)).observed.state is State.STARTING
    taken_back = started(conditions=[disrupted("PreemptionByScheduler") | {"status": "False"}])
    assert project(pod(taken_back, **LEAVING)).observed.state is State.DELETING


def test_one_that_left_the_selector_is_gone_however_it_is() -> None:
    status = started(phase="Running", podIP="10.1.2.3", containerStatuses=[RUNNING])
    one = project(pod(status), removed=True).observed
    assert (one.state, one.endpoint, one.sandbox_id) == (State.DELETED, "", "sb")


@pytest.mark.parametrize("missing", [pods.TENANT, pods.SANDBOX_ID, pods.REQUEST_ID, pods.SPEC])
def test_a_pod_without_our_annotations_is_no_sandbox(missing: str) -> None:
    strange = pod(started())
    del strange["metadata"]["annotations"][missing]
    one = project(strange).observed
    assert (one.uid, one.revision, one.sandbox_id, one.state) == ("u1", 77, "", State.DELETED)


@pytest.mark.parametrize(
    ("name", "value"), [(pods.SPEC, "no base64"), (pods.EXPIRE_MS, "tomorrow"), (pods.CREATE_MS, "")]
)
def test_a_pod_with_annotations_that_make_no_sense_is_no_sandbox(name: str, value: str) -> None:
    strange = pod(started())
    strange["metadata"]["annotations"][name] = value
    assert project(strange).observed.state is State.DELETED


def test_a_pod_without_version_cannot_be_ordered() -> None:
    with pytest.raises(BrokenBodyError):
        project(pod(started(), resourceVersion=""))


def test_a_message_has_a_bound() -> None:
    seen = project(pod(started(containerStatuses=[waiting("ErrImagePull", "x" * 100_000)])))
    assert len(seen.observed.message) == 1000
    assert seen.give_up is not None
    assert len(seen.give_up.message) <= 1000
