"""Pods of one namespace through the API server: raw requests, and what its refusals mean.

Raw, since typed objects would cost a create ten times the work, and nothing here needs them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from services.common import pods
from services.common.errors import (
    FailedPreconditionError,
    OrchardError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.kubernetes import KubernetesClient
from services.common.logs import get_logger
from services.scheduler.throttle import Throttle

_log = get_logger(__name__)

Pod = Mapping[str, Any]

_TIMEOUT: Final = aiohttp.ClientTimeout(total=20.0, connect=5.0, sock_connect=5.0)
_RETRY_AFTER_SECONDS: Final = 1.0
_LOG_SECONDS: Final = 60.0
# Strict: a field that this cluster does not know would else be dropped in silence, hostUsers too.
_CREATE_QUERY: Final = {"fieldValidation": "Strict", "fieldManager": "orchard-scheduler"}
_JSON: Final = "application/json"
_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_PAGE: Final = "500"
_MERGE_PATCH: Final = "application/merge-patch+json"


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API server said."""

    status: int
    retry_after: str
    body: bytes

    @property
    def object(self) -> Pod:
        """The object or Status in it; empty if a proxy's page is all there is."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def pod(self) -> Pod:
        """The Pod in it.

        Raises:
            UnavailableError: it is none, whatever the status says: something in between has answered.
        """
        found = self.object
        if found.get("kind") != "Pod":
            raise _away(f"answers with something that is no Pod (HTTP status {self.status})")
        return found

    @property
    def reason(self) -> str:
        """The Status' reason, such as AlreadyExists."""
        return str(self.object.get("reason", ""))

    @property
    def message(self) -> str:
        """The Status' message."""
        return str(self.object.get("message") or f"HTTP status {self.status}")

    @property
    def not_found(self) -> bool:
        """Whether the API server itself says so; a proxy in between may say 404 too."""
        return self.status == 404 and self.reason == "NotFound"


class PodApi:
    """What each call raises: UnavailableError for what may work later, another OrchardError for what never will."""

    def __init__(
        self,
        client: KubernetesClient,
        namespace: str,
        throttle: Throttle,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._throttle = throttle
        self._clock = clock
        self._complained_at = -_LOG_SECONDS

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()

    async def create(self, pod: Pod) -> Pod | None:
        """Make a Pod; None if one of its name is there."""
        answer = await self._send("POST", "", _JSON, pod, _CREATE_QUERY)
        if answer.status in (201, 202):
            return answer.pod
        if answer.status == 409 and answer.reason == "AlreadyExists":
            return None
        raise self._refusal(answer, "create a Pod")

    async def get(self, name: str) -> Pod | None:
        """One Pod; None if there is none of the name."""
        answer = await self._send("GET", f"/{name}", _JSON)
        if answer.not_found:
            return None
        if answer.status != 200:
            raise self._refusal(answer, "read a Pod")
        return answer.pod

    async def annotations(
        self, labels: str = pods.SELECTOR, fields: str = ""
    ) -> AsyncIterator[tuple[str, str, Mapping[str, str]]]:
        """Name, uid and annotations of every Pod that both selectors match, page by page; by default of sandboxes."""
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": _PAGE, "continue": ""}
        while True:
            answer = await self._send("GET", "", _JSON, query=query, accept=_METADATA)
            listed = answer.object
            if answer.status != 200 or listed.get("kind") != "PartialObjectMetadataList":
                raise self._refusal(answer, "list Pods")
            for item in listed.get("items") or ():  # null where there are none
                metadata = item["metadata"]
                yield metadata["name"], metadata["uid"], metadata.get("annotations") or {}
            query["continue"] = str((listed.get("metadata") or {}).get("continue") or "")
            if not query["continue"]:
                return

    async def annotate(self, name: str, uid: str, annotations: Mapping[str, str]) -> bool:
        """Set annotations of exactly this incarnation; False if it is no more."""
        # A uid that is given must be the one that is there: it cannot be changed.
        patch = {"metadata": {"uid": uid, "annotations": annotations}}
        answer = await self._send("PATCH", f"/{name}", _MERGE_PATCH, patch)
        if answer.not_found or (answer.reason == "Invalid" and "metadata.uid" in _causes(answer.object, "field")):
            return False
        if answer.status != 200:
            raise self._refusal(answer, "patch a Pod")
        return True

    async def delete(self, name: str, *, grace_seconds: int, **preconditions: str) -> None:
        """Delete a Pod if it has this uid and resourceVersion; one that has not, or is no more, is no error."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": grace_seconds,
            "preconditions": preconditions,
        }
        answer = await self._send("DELETE", f"/{name}", _JSON, options)
        if answer.status not in (200, 202, 409) and not answer.not_found:
            raise self._refusal(answer, "delete a Pod")

    async def _send(
        self,
        method: str,
        path: str,
        content_type: str,
        body: Pod | None = None,
        query: dict[str, str] | None = None,
        *,
        accept: str = _JSON,
    ) -> Answer:
        headers = {"Content-Type": content_type, "Accept": accept}
        await self._throttle.turn()
        try:
            response = await self._client.send(
                method,
                f"/api/v1/namespaces/{self._namespace}/pods{path}",
                query=query,
                headers=headers,
                body=None if body is None else orjson.dumps(body),
                timeout=_TIMEOUT,
            )
            async with response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # It may have been carried out: whoever repeats it finds what is there.
            raise _away(f"does not answer ({type(error).__name__})") from error
        return Answer(response.status, response.headers.get("Retry-After", ""), content)

    def _refusal(self, answer: Answer, what: str) -> OrchardError:
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

    def _forbidden(self, answer: Answer, what: str) -> OrchardError:
        message = answer.message
        if "exceeded quota" in message or "failed quota" in message:
            return ResourceExhaustedError(f"the cluster's quota refused it: {message}", reason="CLUSTER_QUOTA")
        if "NamespaceTerminating" in _causes(answer.object, "reason"):
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


def _causes(status: Pod, what: str) -> set[str]:
    """The `reason` or the `field` of each cause that a Status names."""
    causes = (status.get("details") or {}).get("causes") or ()
    return {str(cause.get(what, "")) for cause in causes}
