"""The Kubernetes runtime as the scheduler sees it: create, delete and update of Pods through the API server.

Raw requests of the shared client: typed objects would cost a create ten times the work, and nothing here needs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from services.common import pods
from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    OrchardError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.kubernetes import KubernetesClient
from services.common.logs import get_logger
from services.scheduler.pod_manifest import PodBuilder, PodTerms
from services.scheduler.records import Incarnation, Record, beyond_lifetime
from services.scheduler.throttle import Throttle

_log = get_logger(__name__)

# Apart, as one number would also bound how long a healthy answer may take to begin.
_TIMEOUT: Final = aiohttp.ClientTimeout(total=20.0, connect=5.0, sock_connect=5.0)
_GRACE_SECONDS: Final = 1  # at 0 the object goes before its containers have stopped
_RETRY_AFTER_SECONDS: Final = 1.0
_LOG_SECONDS: Final = 60.0
# What may be answered strictly: a field that this cluster does not know would be dropped in silence, hostUsers too.
_CREATE_QUERY: Final = {"fieldValidation": "Strict", "fieldManager": "orchard-scheduler"}
_JSON: Final = "application/json"
_MERGE_PATCH: Final = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the API server said."""

    status: int
    retry_after: str
    body: bytes

    @property
    def object(self) -> Mapping[str, Any]:
        """The object or Status in it; empty if a proxy's page is all there is."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def not_found(self) -> bool:
        """Whether the API server itself says so; a proxy in between may say 404 too."""
        return self.status == 404 and self.reason == "NotFound"

    @property
    def reason(self) -> str:
        """The Status' reason, such as AlreadyExists."""
        return str(self.object.get("reason", ""))

    @property
    def message(self) -> str:
        """The Status' message."""
        return str(self.object.get("message") or f"HTTP status {self.status}")


class KubernetesRuntime:
    """Pods of one namespace."""

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        builder: PodBuilder,
        throttle: Throttle,
        *,
        terms_of: Callable[[bytes], PodTerms],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._builder = builder
        self._throttle = throttle
        self._terms_of = terms_of
        self._clock = clock
        self._complained_at = -_LOG_SECONDS

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def check(self, tenant: str, sandbox_id: str, spec: bytes) -> None:  # noqa: ARG002
        """See service.Runtime."""
        self._builder.check(spec, self._terms_of(spec))

    async def create(self, record: Record) -> str:
        """See service.Runtime."""
        pod = self._builder.pod(record, self._terms_of(record.spec))
        answer = await self._send("POST", "", _JSON, pod, _CREATE_QUERY)
        if answer.status in (200, 201, 202):
            return str(answer.object["metadata"]["uid"])
        if answer.status == 409 and answer.reason == "AlreadyExists":
            return await self._adopt(record)
        raise self._refusal(answer, "create a Pod")

    async def _adopt(self, record: Record) -> str:
        """The uid of the Pod that has the name, if this very create made it: an answer or a scheduler was lost."""
        name = pods.pod_name(record.tenant, record.sandbox_id)
        found = await self._get(name)
        if found is None:
            raise UnavailableError("the Pod that had its name has just gone", reason="POD_IN_THE_WAY")
        metadata = found["metadata"]
        notes: Mapping[str, str] = metadata.get("annotations") or {}
        if metadata.get("deletionTimestamp"):
            raise UnavailableError("the Pod that had its name before is still being removed", reason="POD_IN_THE_WAY")
        if notes.get(pods.REQUEST_ID) == record.request_id and notes.get(pods.SPEC_HASH) == record.spec_hash:
            return str(metadata["uid"])
        if _is_leftover(metadata, notes, record):
            # Its record has ended, or this one would not be: whoever ended it removes it.
            raise UnavailableError(
                "the Pod of the sandbox that had its id before is still there", reason="POD_IN_THE_WAY"
            )
        raise AlreadyExistsError(
            f"a Pod {name!r} exists that this create did not make; delete it, or choose another id",
            reason="POD_EXISTS",
            pod=name,
        )

    async def delete(self, gone: Incarnation, *, force: bool = False) -> None:
        """See service.Runtime. Returns when the API server has taken it; the watcher sees it go."""
        name = pods.pod_name(gone.tenant, gone.sandbox_id)
        preconditions = {"uid": gone.uid}
        if force:
            found = await self._get(name)
            if found is None or found["metadata"]["uid"] != gone.uid:
                return
            # What was just read is what may go: a Pod that still changes is not stuck.
            preconditions["resourceVersion"] = found["metadata"]["resourceVersion"]
            force = "deletionTimestamp" in found["metadata"]
        answer = await self._send(
            "DELETE",
            f"/{name}",
            _JSON,
            {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0 if force else _GRACE_SECONDS,
                "preconditions": preconditions,
            },
        )
        # 409: another incarnation has the name.
        if answer.status not in (200, 202, 409) and not answer.not_found:
            raise self._refusal(answer, "delete a Pod")

    async def update(self, kept: Incarnation, expire_ms: int) -> None:
        """See service.Runtime."""
        name = pods.pod_name(kept.tenant, kept.sandbox_id)
        found = await self._get(name)
        if found is None or found["metadata"]["uid"] != kept.uid:
            raise NotFoundError(f"there is no Pod of sandbox {kept.sandbox_id!r}", reason="POD_NOT_FOUND")
        _check_deadline(found, expire_ms)
        # A uid that is given must be the one that is there: it cannot be changed.
        patch = {"metadata": {"uid": kept.uid, "annotations": {pods.EXPIRE_MS: str(expire_ms)}}}
        answer = await self._send("PATCH", f"/{name}", _MERGE_PATCH, patch)
        if answer.not_found or answer.status in (409, 422):
            raise NotFoundError(f"there is no Pod of sandbox {kept.sandbox_id!r}", reason="POD_NOT_FOUND")
        if answer.status != 200:
            raise self._refusal(answer, "patch a Pod")

    async def is_gone(self, missing: Incarnation) -> bool:
        """See service.Runtime."""
        found = await self._get(pods.pod_name(missing.tenant, missing.sandbox_id))
        return found is None or found["metadata"]["uid"] != missing.uid

    async def _get(self, name: str) -> Mapping[str, Any] | None:
        answer = await self._send("GET", f"/{name}", _JSON)
        if answer.not_found:
            return None
        if answer.status != 200:
            raise self._refusal(answer, "read a Pod")
        return answer.object

    async def _send(
        self,
        method: str,
        path: str,
        content_type: str,
        body: Mapping[str, Any] | None = None,
        query: dict[str, str] | None = None,
    ) -> _Answer:
        api = self._client.api
        headers = {"Content-Type": content_type, "Accept": _JSON, "User-Agent": api.user_agent}
        await self._throttle.turn()
        await api.update_params_for_auth(headers, [], ["BearerToken"])
        url = f"{api.configuration.host}/api/v1/namespaces/{self._namespace}/pods{path}"
        try:
            response = await api.rest_client.request(
                method,
                url,
                query_params=query,
                headers=headers,
                body=body,
                _preload_content=False,
                _request_timeout=_TIMEOUT,
            )
            async with response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # It may have been carried out: whoever repeats it finds what is there.
            raise _away(f"does not answer ({type(error).__name__})") from error
        return _Answer(response.status, response.headers.get("Retry-After", ""), content)

    def _refusal(self, answer: _Answer, what: str) -> OrchardError:
        """An answer that is not what was asked for: for ever, or only for now."""
        status, message = answer.status, answer.message
        if status == 429 or (answer.retry_after and status >= 500):
            self._throttle.pause(_seconds(answer.retry_after))
            return _away(f"is busy: {message}")
        if status == 401:
            self._client.forget_credentials()
            self._complain(f"the API server does not accept the credentials: {message}")
            return _away("does not accept the scheduler's credentials")
        if status == 403:
            return self._forbidden(answer, what)
        if answer.not_found:
            self._complain(f"namespace {self._namespace!r} is not there: {message}")
            return _away(f"has no namespace {self._namespace!r}")
        if status in (400, 413, 422):
            return FailedPreconditionError(f"the API server refused the Pod: {message}", reason="POD_REFUSED")
        return _away(f"cannot do it now: {message}")

    def _forbidden(self, answer: _Answer, what: str) -> OrchardError:
        message = answer.message
        if "exceeded quota" in message or "failed quota" in message:
            return ResourceExhaustedError(f"the cluster's quota refused it: {message}", reason="CLUSTER_QUOTA")
        if _causes(answer.object) & {"NamespaceTerminating"}:
            return _away(f"is removing the namespace: {message}")
        if " cannot " in message and "User " in message:
            self._complain(f"the scheduler may not {what}; grant its Role (deploy/kustomize/base/rbac.yaml): {message}")
            return _away(f"does not let the scheduler {what}")
        return FailedPreconditionError(f"the cluster's admission refused the Pod: {message}", reason="POD_REFUSED")

    def _complain(self, message: str) -> None:
        """What only the operator can mend, once a minute and not with each retry."""
        now = self._clock()
        if now - self._complained_at >= _LOG_SECONDS:
            self._complained_at = now
            _log.error(message, namespace=self._namespace)


def _away(what: str) -> UnavailableError:
    return UnavailableError(f"the Kubernetes API server {what}", reason="RUNTIME_UNAVAILABLE")


def _seconds(retry_after: str) -> float:
    """Of a Retry-After header; the API server gives whole seconds, a proxy may give a date."""
    return float(retry_after) if retry_after.isdecimal() else _RETRY_AFTER_SECONDS


def _causes(status: Mapping[str, Any]) -> set[str]:
    causes = (status.get("details") or {}).get("causes") or ()
    return {str(cause.get("reason", "")) for cause in causes}


def _is_leftover(metadata: Mapping[str, Any], notes: Mapping[str, str], record: Record) -> bool:
    """Whether a Pod is of an earlier create under the record's id."""
    return (
        (metadata.get("labels") or {}).get(pods.MANAGED_BY_LABEL) == pods.MANAGED_BY
        and notes.get(pods.TENANT) == record.tenant
        and notes.get(pods.SANDBOX_ID) == record.sandbox_id
        and notes.get(pods.CREATE_MS, "").isdecimal()
        and int(notes[pods.CREATE_MS]) < record.create_ms
    )


def _check_deadline(pod: Mapping[str, Any], expire_ms: int) -> None:
    """A Pod's activeDeadlineSeconds cannot be raised: a lease beyond it would be a promise that is not kept."""
    seconds = pod["spec"].get("activeDeadlineSeconds")
    created = (pod["metadata"].get("annotations") or {}).get(pods.CREATE_MS, "")
    if seconds is None or not created.isdecimal():
        return
    last_ms = int(created) + int(seconds) * 1000
    if expire_ms > last_ms:
        raise beyond_lifetime("ttl", last_ms)
