"""What a Pod says of its sandbox: some ten fields of it, as a state, a reason and a sentence.

The states are those of a Pod with restartPolicy Never, whose containers never run twice. What the kubelet and the
controllers write where: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ and .../disruptions/.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from services.common import pods
from services.common.observed import Observed
from services.common.states import Reason, State
from services.watcher.model import GiveUp, Seen
from services.watcher.pod_lines import version_of

Json = dict[str, Any]

_MESSAGE_CHARACTERS: Final = 1000
_CACHED_SPEC_CHARACTERS: Final = 4096
_NEVER_PULLED: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
_PULL_FAILED: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"}
)
_BEING_MADE: Final = frozenset({"", "ContainerCreating", "PodInitializing"})
# Of Pod.status.reason.
_POD_ENDS: Final = {
    "Evicted": Reason.EVICTED,
    "Preempting": Reason.EVICTED,
    "DeadlineExceeded": Reason.EXPIRED,
    "NodeLost": Reason.NODE_LOST,
    "NodeShutdown": Reason.NODE_LOST,
    "Shutdown": Reason.NODE_LOST,
    "Terminated": Reason.NODE_LOST,  # by the shutdown of its node
}
# Of the condition DisruptionTarget.
_DISRUPTIONS: Final = {
    "DeletionByTaintManager": Reason.NODE_LOST,
    "DeletionByPodGC": Reason.NODE_LOST,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "PreemptionByScheduler": Reason.EVICTED,
    "TerminationByKubelet": Reason.EVICTED,
}


class Standing(NamedTuple):
    """How a sandbox stands."""

    state: State
    reason: Reason = Reason.UNSPECIFIED
    message: str = ""
    endpoint: str = ""
    running: bool = False
    give_up: GiveUp | None = None


def project(pod: Json, *, removed: bool = False, complete_revision: int = 0) -> Seen:
    """What to know of a Pod; of one without our annotations only that it is no sandbox (DELETED).

    Args:
        pod: the Pod, or with `removed` its last form.
        removed: the API server has it no more, or it left the selector.
        complete_revision: see model.Synced.

    Raises:
        BrokenBodyError: it has no resource version.
        KeyError, TypeError, AttributeError, ValueError: it is not of a Pod's form.
    """
    revision = version_of(pod)
    metadata = pod["metadata"]
    uid = metadata["uid"]
    notes = metadata.get("annotations") or {}
    try:
        spec, patience = _spec_of(notes[pods.SPEC])
        made_ms = _ms_of(metadata["creationTimestamp"])
        tenant, sandbox_id, request_id = notes[pods.TENANT], notes[pods.SANDBOX_ID], notes[pods.REQUEST_ID]
        create_ms, expire_ms = int(notes.get(pods.CREATE_MS, made_ms)), int(notes.get(pods.EXPIRE_MS, 0))
    except (KeyError, ValueError, TypeError):
        nobody = Observed("", "", uid, revision, State.DELETED)
        return Seen(nobody, 0.0, complete_revision=complete_revision)
    standing = standing_of(pod, made_ms, patience, removed=removed)
    observed = Observed(
        tenant,
        sandbox_id,
        uid,
        revision,
        standing.state,
        standing.reason,
        standing.message,
        standing.endpoint,
        create_ms,
        0,
        expire_ms,
        request_id,
        notes.get(pods.SPEC_HASH, ""),
        spec,
    )
    return Seen(observed, patience.start, standing.running, standing.give_up, complete_revision)


def _spec_of(annotation: str) -> tuple[bytes, pods.Patience]:
    # Thousands of sandboxes of one job share a spec; a large one is rarely shared and would fill the cache.
    return _decoded(annotation) if len(annotation) > _CACHED_SPEC_CHARACTERS else _cached(annotation)


def _decoded(annotation: str) -> tuple[bytes, pods.Patience]:
    spec = pods.decode_spec(annotation)
    return spec, pods.patience_of(spec)


_cached = lru_cache(maxsize=1024)(_decoded)


@lru_cache(maxsize=1024)
def _ms_of(timestamp: str) -> int:
    # Every event of a Pod has the time of its making, and Pods are made many in a second.
    return int(datetime.fromisoformat(timestamp).timestamp() * 1000)


def standing_of(pod: Json, made_ms: int, patience: pods.Patience, *, removed: bool = False) -> Standing:
    """How the sandbox of a Pod that was made at `made_ms` stands."""
    status = pod.get("status") or {}
    leaving = removed or "deletionTimestamp" in pod["metadata"]
    phase = status.get("phase", "")
    # Whoever disrupts a Pod says so first and then removes it; one who does not get that far takes it back.
    if (leaving or phase == "Failed") and (why := _disruption(status)) is not None:
        return Standing(State.DELETED if removed else State.FAILED, *why)
    if leaving:
        return Standing(State.DELETED if removed else State.DELETING)
    if phase in ("Failed", "Succeeded"):
        return Standing(State.FAILED, *_end(status))
    if not _scheduled(status):
        return _unscheduled(status, made_ms, patience)
    return _starting(status, made_ms, patience)


def _disruption(status: Json) -> tuple[Reason, str] | None:
    if status.get("reason") == "NodeLost":
        return Reason.NODE_LOST, _text("its node was lost", status)
    if status.get("reason") in _POD_ENDS:
        return None  # says more
    condition = _condition(status, "DisruptionTarget")
    reason = _DISRUPTIONS.get(condition.get("reason", ""))
    if reason is None or condition.get("status") != "True":
        return None
    what = "its node was lost" if reason is Reason.NODE_LOST else "it was evicted"
    return reason, _text(what, condition)


def _end(status: Json) -> tuple[Reason, str]:
    """Why a Pod that has ended did."""
    code = status.get("reason", "")
    if (reason := _POD_ENDS.get(code)) is not None:
        return reason, _text(f"its Pod ended: {code}", status)
    for container in _containers(status):
        ended = (container.get("state") or {}).get("terminated")
        if ended and (ended.get("exitCode") or container.get("name") == pods.CONTAINER):
            return _container_end(container.get("name", ""), ended)
    if code and not any(container.get("state") for container in _containers(status)):
        # Its node did not admit it: OutOfcpu, NodeAffinity, UnexpectedAdmissionError and so on.
        return Reason.UNSCHEDULABLE, _text(f"its node refused it: {code}", status)
    return Reason.AGENT_START, _text(f"its Pod ended: {code or status.get('phase', '')}", status)


def _container_end(name: str, ended: Json) -> tuple[Reason, str]:
    what = "its container" if name == pods.CONTAINER else f"its container {name!r}"
    code = ended.get("reason", "")
    if code == "OOMKilled":
        return Reason.OOM, _text(f"{what} ran out of memory", ended)
    if code == "ContainerStatusUnknown":
        return Reason.NODE_LOST, _text("its node lost it, as by a restart", ended)
    how = f"signal {ended['signal']}" if ended.get("signal") else f"exit code {ended.get('exitCode', 'unknown')}"
    return Reason.AGENT_START, _text(
        f"{what} ended with {how}{f' ({code})' if code not in ('', 'Error') else ''}", ended
    )


def _scheduled(status: Json) -> bool:
    """Whether it has a node: said by whoever gave it one, or by that node itself."""
    return "startTime" in status or _condition(status, "PodScheduled").get("status") == "True"


def _unscheduled(status: Json, made_ms: int, patience: pods.Patience) -> Standing:
    condition = _condition(status, "PodScheduled")
    if condition.get("status") == "False":
        reason, message = Reason.UNSCHEDULABLE, _text("no node can take it yet", condition)
        last = _text(f"no node took it within the start timeout of {patience.start:g} s", condition)
    else:
        reason, message = Reason.UNSPECIFIED, "it waits for a node"
        last = f"no scheduler gave it a node within the start timeout of {patience.start:g} s"
    give_up = GiveUp(made_ms + int(patience.start * 1000), Reason.UNSCHEDULABLE, last)
    return Standing(State.STARTING, reason, message, give_up=give_up)


def _starting(status: Json, made_ms: int, patience: pods.Patience) -> Standing:
    """Of a Pod that has a node."""
    running = False
    for container in _containers(status):
        state = container.get("state") or {}
        if (waiting := state.get("waiting")) is not None:
            code = waiting.get("reason", "")
            if code not in _BEING_MADE:
                return _held_up(container, code, waiting, made_ms, patience)
        elif container.get("name") == pods.CONTAINER:
            if "terminated" in state:
                return Standing(State.FAILED, *_end(status))
            running = "running" in state
    address = status.get("podIP", "")
    endpoint = _endpoint(address) if address else ""
    if running and endpoint:
        return Standing(State.STARTING, message="its agent starts", endpoint=endpoint, running=True)
    seconds = patience.start + patience.pull
    message = "its image is being pulled or its containers are being made"
    give_up = GiveUp(
        made_ms + int(seconds * 1000),
        Reason.AGENT_START,
        f"its containers did not run within {seconds:g} s, the start and pull timeouts together",
    )
    # The agent may run a second before the kubelet says so.
    return Standing(State.STARTING, message=message, endpoint=endpoint, give_up=give_up)


def _held_up(container: Json, code: str, waiting: Json, made_ms: int, patience: pods.Patience) -> Standing:
    """Of a Pod with a container that cannot start."""
    image = container.get("image", "")
    if code in _NEVER_PULLED:
        return Standing(State.FAILED, Reason.IMAGE_PULL, _text(f"image {image!r} cannot be used: {code}", waiting))
    if code in _PULL_FAILED:
        message = _text(f"image {image!r} cannot be pulled yet: {code}", waiting)
        last = _text(f"image {image!r} could not be pulled (pull timeout {patience.pull:g} s): {code}", waiting)
        give_up = GiveUp(made_ms + int(patience.pull * 1000), Reason.IMAGE_PULL, last)
        return Standing(State.STARTING, Reason.IMAGE_PULL, message, give_up=give_up)
    seconds = patience.start + patience.pull
    message = _text(f"its container {container.get('name', '')!r} cannot start yet: {code}", waiting)
    last = _text(f"its container did not start within {seconds:g} s: {code}", waiting)
    give_up = GiveUp(made_ms + int(seconds * 1000), Reason.AGENT_START, last)
    return Standing(State.STARTING, Reason.AGENT_START, message, give_up=give_up)


def _endpoint(address: str) -> str:
    return f"[{address}]:{pods.AGENT_PORT}" if ":" in address else f"{address}:{pods.AGENT_PORT}"


def _condition(status: Json, kind: str) -> Json:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind:
            return condition  # type: ignore[no-any-return]
    return {}


def _containers(status: Json) -> list[Json]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _text(what: str, source: Json) -> str:
    message = " ".join(str(source.get("message") or "").split())
    return (f"{what}: {message}" if message else what)[:_MESSAGE_CHARACTERS]
