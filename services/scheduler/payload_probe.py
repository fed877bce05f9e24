"""Finds out how the payload comes into Pods on this cluster, by a Pod that tries the better way."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final

from services.common.backoff import Backoff
from services.common.errors import FailedPreconditionError, OrchardError, ResourceExhaustedError, UnavailableError
from services.common.logs import get_logger
from services.scheduler.injection import Delivery, probe_spec
from services.scheduler.pod_api import Pod, PodApi

_log = get_logger(__name__)

_TRY_SECONDS: Final = 120.0  # the payload's own pull included
_LOOK_SECONDS: Final = 0.25
_LABELS: Final = {"app.kubernetes.io/managed-by": "orchard", "app.kubernetes.io/component": "payload-probe"}
_SELECTOR: Final = ",".join(f"{key}={value}" for key, value in _LABELS.items())
# One that a killed scheduler left ends by itself, long after whoever made it would have given up.
_DEADLINE_SECONDS: Final = 2 * _TRY_SECONDS
_ENDED: Final = "status.phase!=Pending,status.phase!=Running"
# A volume that the node cannot mount shows as one of these, for ever; a slow pull does not.
_HOPELESS: Final = frozenset({"CreateContainerError", "CreateContainerConfigError", "RunContainerError"})


async def find_delivery(
    api: PodApi,
    image: str,
    pull_policy: str,
    placement: Mapping[str, Any],
    *,
    try_seconds: float = _TRY_SECONDS,
) -> Delivery:
    """IMAGE_VOLUME where a Pod with such a volume ran, else COPY. Waits for an API server that is away.

    `placement` is added to the Pod's spec: it must run where sandboxes run.
    """
    backoff = Backoff(0.2, 10.0)
    while True:
        try:
            spec = {**probe_spec(image, pull_policy), "activeDeadlineSeconds": int(_DEADLINE_SECONDS), **placement}
            why = await _try(api, spec, try_seconds)
        except (UnavailableError, ResourceExhaustedError) as error:
            _log.warning("how the payload comes into Pods is not known yet", why=error.message)
            await asyncio.sleep(backoff.next())
            continue
        delivery = Delivery.COPY if why else Delivery.IMAGE_VOLUME
        _log.info("payload delivery chosen", delivery=delivery.value, why=why)
        await _remove_leftovers(api)
        return delivery


async def _try(api: PodApi, spec: Mapping[str, Any], try_seconds: float) -> str:
    """Empty if the Pod succeeded, else why not."""
    name = f"payload-probe-{secrets.token_hex(6)}"
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": _LABELS}, "spec": spec}
    try:
        made = await api.create(pod)
    except FailedPreconditionError as error:
        return error.message
    if made is None:
        raise UnavailableError(f"a Pod {name!r} is there already")
    try:
        async with asyncio.timeout(try_seconds):
            while True:
                why = _verdict(await api.get(name))
                if why is not None:
                    return why
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        return f"the probe Pod did not end within {try_seconds:g} s"
    finally:
        await _remove(api, name, str(made["metadata"]["uid"]))


def _verdict(pod: Pod | None) -> str | None:
    """Empty: it works; None: not known yet; else why it does not."""
    if pod is None:
        raise UnavailableError("the probe Pod was removed by somebody else")
    status = pod.get("status") or {}
    if status.get("phase") == "Succeeded":
        return ""
    if status.get("phase") == "Failed":
        return str(status.get("message") or "the probe Pod failed")
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    return None


async def _remove_leftovers(api: PodApi) -> None:
    """Remove what schedulers left that were killed while they tried. One that has not read its own yet tries again."""
    try:
        found = [(name, uid) async for name, uid, _notes in api.annotations(_SELECTOR, _ENDED)]
    except OrchardError as error:
        _log.warning("probe Pods of earlier schedulers may be left", why=error.message)
        return
    for name, uid in found:
        await _remove(api, name, uid)


async def _remove(api: PodApi, name: str, uid: str) -> None:
    try:
        await api.delete(name, grace_seconds=0, uid=uid)
    except OrchardError as error:
        _log.warning("the probe Pod was left behind", pod=name, why=error.message)
