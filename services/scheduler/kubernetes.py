"""The Kubernetes runtime as the scheduler sees it: sandboxes as Pods of one namespace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from services.common import pods
from services.common.errors import AlreadyExistsError, NotFoundError, UnavailableError
from services.scheduler import pod_manifest
from services.scheduler.injection import Injection
from services.scheduler.pod_api import Pod, PodApi
from services.scheduler.pod_manifest import PodBuilder, PodProfile, PodTerms
from services.scheduler.records import Incarnation, Record, beyond_lifetime

_GRACE_SECONDS: Final = 1  # at 0 the object goes before its containers have stopped


class KubernetesRuntime:
    """See service.Runtime. A Pod is addressed by its name, which another incarnation may have later: by its uid too."""

    def __init__(self, api: PodApi, profile: PodProfile, *, terms_of: Callable[[bytes], PodTerms]) -> None:
        self._api = api
        self._profile = profile
        self._terms_of = terms_of
        self._injection: Injection | None = None
        self._builder: PodBuilder | None = None

    def inject(self, injection: Injection) -> None:
        """What brings the agent into each Pod; nothing is created before it is known."""
        self._injection = injection
        self._builder = PodBuilder(self._profile, injection)

    def use_keys(self, public_keys_pem: str) -> None:
        """What the agents of Pods to come check tokens with."""
        self._profile = replace(self._profile, public_keys_pem=public_keys_pem)
        if self._injection is not None:
            self._builder = PodBuilder(self._profile, self._injection)

    async def check(self, tenant: str, sandbox_id: str, spec: bytes) -> None:  # noqa: ARG002
        """See service.Runtime."""
        pod_manifest.check(self._profile, spec, self._terms_of(spec))

    async def create(self, record: Record) -> str:
        """See service.Runtime."""
        if self._builder is None:
            raise UnavailableError(
                "it is not known yet how the agent comes into Pods here", reason="RUNTIME_UNAVAILABLE"
            )
        made = await self._api.create(self._builder.pod(record, self._terms_of(record.spec)))
        return await self._adopt(record) if made is None else str(made["metadata"]["uid"])

    async def _adopt(self, record: Record) -> str:
        """The uid of the Pod that has the name, if this very create made it: an answer or a scheduler was lost."""
        name = pods.pod_name(record.tenant, record.sandbox_id)
        found = await self._api.get(name)
        if found is None:
            raise _in_the_way("has just gone")
        metadata = found["metadata"]
        if metadata.get("deletionTimestamp"):
            raise _in_the_way("is still being removed")
        notes: Mapping[str, str] = metadata.get("annotations") or {}
        if notes.get(pods.REQUEST_ID) == record.request_id and notes.get(pods.SPEC_HASH) == record.spec_hash:
            return str(metadata["uid"])
        if _is_leftover(metadata, notes, record):
            # Its record has ended, or this one would not be: whoever ended it removes it.
            raise _in_the_way("is still there")
        raise AlreadyExistsError(
            f"a Pod {name!r} exists that this create did not make; delete it, or choose another id",
            reason="POD_EXISTS",
            pod=name,
        )

    async def delete(self, gone: Incarnation, *, force: bool = False) -> None:
        """See service.Runtime. Returns when the API server has taken it; the watcher sees it go."""
        name = pods.pod_name(gone.tenant, gone.sandbox_id)
        if not force:
            await self._api.delete(name, grace_seconds=_GRACE_SECONDS, uid=gone.uid)
            return
        found = await self._api.get(name)
        if found is None or found["metadata"]["uid"] != gone.uid:
            return
        metadata = found["metadata"]
        # What was just read is what may go: a Pod that still changes is not stuck.
        await self._api.delete(
            name,
            grace_seconds=0 if "deletionTimestamp" in metadata else _GRACE_SECONDS,
            uid=gone.uid,
            resourceVersion=metadata["resourceVersion"],
        )

    async def update(self, kept: Incarnation, expire_ms: int) -> None:
        """See service.Runtime."""
        name = pods.pod_name(kept.tenant, kept.sandbox_id)
        found = await self._api.get(name)
        if found is not None and found["metadata"]["uid"] == kept.uid:
            _check_deadline(found, expire_ms)
            if await self._api.annotate(name, kept.uid, {pods.EXPIRE_MS: str(expire_ms)}):
                return
        raise NotFoundError(f"there is no Pod of sandbox {kept.sandbox_id!r}", reason="POD_NOT_FOUND")

    async def is_gone(self, missing: Incarnation) -> bool:
        """See service.Runtime."""
        found = await self._api.get(pods.pod_name(missing.tenant, missing.sandbox_id))
        return found is None or found["metadata"]["uid"] != missing.uid


def _in_the_way(how: str) -> UnavailableError:
    return UnavailableError(f"the Pod that had its name before {how}", reason="POD_IN_THE_WAY")


def _is_leftover(metadata: Pod, notes: Mapping[str, Any], record: Record) -> bool:
    """Whether a Pod is of an earlier create under the record's id."""
    created = str(notes.get(pods.CREATE_MS, ""))
    return (
        (metadata.get("labels") or {}).get(pods.MANAGED_BY_LABEL) == pods.MANAGED_BY
        and notes.get(pods.TENANT) == record.tenant
        and notes.get(pods.SANDBOX_ID) == record.sandbox_id
        and created.isdecimal()
        and int(created) < record.create_ms
    )


def _check_deadline(pod: Pod, expire_ms: int) -> None:
    """A Pod's activeDeadlineSeconds cannot be raised: a lease beyond it would be a promise that is not kept."""
    seconds = pod["spec"].get("activeDeadlineSeconds")
    created = str((pod["metadata"].get("annotations") or {}).get(pods.CREATE_MS, ""))
    if seconds is None or not created.isdecimal():
        return
    last_ms = int(created) + int(seconds) * 1000
    if expire_ms > last_ms:
        raise beyond_lifetime("ttl", last_ms)
