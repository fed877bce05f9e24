"""Calls to the gateway: metadata, deadlines, retries, and errors with a type."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from orchard._client.calls import CallContext, Dialogue, Stream
from orchard._client.ending import Ending
from orchard._client.errors import OrchardError, Unavailable
from orchard._client.pool import Connection, Pool
from orchard._client.profile import Profile
from orchard._client.runtime import grpc_module
from orchard._client.status import REQUEST_ID_KEY, CallFailed, call_failed, error_of
from orchard._client.tls import diagnose
from orchard._client.tracing import Operation, Tracing

if TYPE_CHECKING:
    from orchard.sandbox.v1 import sandbox_service_pb2

Response = TypeVar("Response")

# Longer than it takes keepalive to find a dead connection (40 s), so that such a call is retried and not given up.
CALL_SECONDS: Final = 60.0
_FIRST_DELAY: Final = 0.05
_MAXIMUM_DELAY: Final = 5.0
# Before anything ever answered, a wrong address or a platform that is not up is likelier than a short outage.
_FIRST_CONTACT_SECONDS: Final = 5.0
# A secret environment that takes longer was lost on its way.
_SECRET_PATIENCE_SECONDS: Final = 5.0
# A thousand calls that fail together need not all ask why.
_DIAGNOSES_AT_ONCE: Final = 4


class Retry:
    """Exponential backoff with full jitter, bounded by the time since the first failure after a success.

    The quiet before it is no outage: a stream may have nothing to say for hours.

    Args:
        budget_seconds: the bound, or what gives it whenever an attempt has failed.
    """

    def __init__(self, budget_seconds: float | Callable[[], float]) -> None:
        self._budget = budget_seconds
        self._since = time.monotonic()
        self._failures = 0
        self.attempts = 1
        self.may_have_acted = False
        """Whether an attempt failed of which nobody knows whether it was carried out."""

    def succeeded(self) -> None:
        """Something came through: the budget starts anew."""
        self._failures = 0

    @property
    def failing_seconds(self) -> float:
        """Since the first failure after the last success; 0 before it."""
        return time.monotonic() - self._since if self._failures else 0.0

    async def failed(self, retry_seconds: float) -> bool:
        """Wait before the next attempt; False if the budget is used up. `retry_seconds` is what the server asked
        for.
        """
        if not self._failures:
            self._since = time.monotonic()
        ceiling = min(_MAXIMUM_DELAY, _FIRST_DELAY * 2**self._failures)
        delay = max(random.uniform(0, ceiling), retry_seconds * random.uniform(1, 1.25))  # noqa: S311
        budget = self._budget() if callable(self._budget) else self._budget
        if time.monotonic() + delay - self._since > budget:
            return False
        self._failures += 1
        self.attempts += 1
        await asyncio.sleep(delay)
        return True


class Transport:
    """Makes the calls of one client.

    Raises, when it is made:
        ConfigurationError: the profile cannot be used, or its key would go in the clear over a network.
    """

    def __init__(self, profile: Profile, *, retry_seconds: float, tracing: Tracing | None) -> None:
        profile.check()
        self.profile = profile
        self.tracing = tracing
        self._pool = Pool(profile)
        self._retry_seconds = retry_seconds
        self._reached = False
        self._diagnoses = 0
        self._authorization = ("authorization", f"Bearer {profile.api_key}")
        self._untraced: AbstractContextManager[None] = nullcontext()
        self.secret_creates: dict[str, sandbox_service_pb2.CreateSandboxRequest] = {}
        """Creates with a secret environment, by sandbox id: a gateway that is restarted forgets what it held."""

    def retry(self) -> Retry:
        """The retries of one operation."""
        return Retry(self._budget)

    def _budget(self) -> float:
        return self._retry_seconds if self._reached else min(self._retry_seconds, _FIRST_CONTACT_SECONDS)

    def context(self, operation: Operation | None = None) -> CallContext:
        """Metadata of one operation; its attempts share the request id."""
        request_id = os.urandom(8).hex()
        metadata = (self._authorization, (REQUEST_ID_KEY, request_id))
        return CallContext(metadata if operation is None else metadata + operation.metadata, request_id)

    def operation(self, name: str, **attributes: str) -> AbstractContextManager[Operation | None]:
        """A client span around one operation; None where tracing is off."""
        return self._untraced if self.tracing is None else self.tracing.span(name, attributes)

    async def unary(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[Response]]],
        request: Any,
        *,
        timeout: float | None = CALL_SECONDS,
        sandbox_id: str = "",
        context: CallContext | None = None,
        retry: Retry | None = None,
    ) -> Response:
        """One idempotent call, repeated while it is UNAVAILABLE. `timeout` None: a dead connection ends it.

        Raises:
            OrchardError: the typed error of its status, or ClientClosed.
        """
        context = context or self.context()
        retry = retry or self.retry()
        while True:
            try:
                response = await self._once(method, request, timeout, context)
            except CallFailed as error:
                await self.pause_or_raise(error, retry, sandbox_id)
            else:
                self._reached = True
                return response

    async def pause_or_raise(self, error: CallFailed, retry: Retry, sandbox_id: str) -> None:
        """Wait before the next attempt after a transient failure; raise the typed error of any other."""
        failure = error.failure
        if failure.is_transient and failure.may_have_acted:
            retry.may_have_acted = True
        if failure.from_platform:
            self._reached = True
        if failure.reason == "SECRET_ENV_PENDING" and retry.failing_seconds > _SECRET_PATIENCE_SECONDS:
            await self._deliver_secret_again(sandbox_id)
        unreachable = failure.code == "UNAVAILABLE" and not failure.from_platform
        if unreachable and not self._reached and (wrong := await self._diagnose()) is not None:
            # No repeat will help, and the retries' end would only say that nobody answered.
            raise wrong from None
        if failure.is_transient and await retry.failed(failure.retry_seconds):
            return
        if unreachable and self._reached and (wrong := await self._diagnose()) is not None:
            raise wrong from None
        cause = _cause(failure.message)
        if unreachable:
            failure = replace(failure, message=f"Orchard at {self.profile.endpoint} answers no more ({cause})")
        typed = error_of(failure, sandbox_id=sandbox_id, attempts=retry.attempts)
        if not self._reached and failure.code == "UNAVAILABLE":
            raise Unavailable(
                f"cannot reach Orchard at {self.profile.endpoint} ({cause}); start it with "
                f"`orchard up`, or check ORCHARD_ENDPOINT",
                reason="UNREACHABLE",
                attempts=retry.attempts,
            ) from None
        raise typed from None

    async def _diagnose(self) -> Unavailable | None:
        if self._diagnoses >= _DIAGNOSES_AT_ONCE:
            return None
        self._diagnoses += 1
        try:
            return await diagnose(self.profile)
        finally:
            self._diagnoses -= 1

    async def _deliver_secret_again(self, sandbox_id: str) -> None:
        create = self.secret_creates.get(sandbox_id)
        if create is not None:
            # Idempotent by its request id: nothing is made, and the gateway holds the secret again.
            with suppress(OrchardError):
                await self.unary(lambda c: c.sandbox.CreateSandbox, create, retry=Retry(0.0))

    async def _once(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[Response]]],
        request: Any,
        timeout: float | None,
        context: CallContext,
    ) -> Response:
        with self._pool.connection() as connection:
            try:
                return await method(connection)(request, timeout=timeout, metadata=context.metadata)
            except grpc_module().aio.AioRpcError as error:
                raise call_failed(error, context.request_id) from None
            except asyncio.CancelledError:
                self._pool.check_cancelled()
                raise

    async def upload(
        self,
        method: Callable[[Connection], Callable[..., Awaitable[Response]]],
        requests: Callable[[], AsyncIterator[Any]],
        *,
        sandbox_id: str,
        context: CallContext,
        retry: Retry | None,
    ) -> Response:
        """A client-streaming call, repeated from the start while it is UNAVAILABLE (retry None: made once). It has no
        deadline of its own; a dead connection ends it.

        Raises:
            OrchardError: the typed error of its status.
        """
        while True:
            source = Source(requests())
            try:
                with self._pool.connection() as connection:
                    call: Any = method(connection)(source, timeout=None, metadata=context.metadata)
                    ending = Ending(call)
                    try:
                        response: Response = await call
                    except grpc_module().aio.AioRpcError as error:
                        raise ending.failed(error, context.request_id) from None
            except CallFailed as error:
                if source.error is not None:
                    raise source.error from None
                await self.pause_or_raise(error, retry or Retry(0.0), sandbox_id)
            except asyncio.CancelledError:
                # gRPC cancels the call when its request iterator raises.
                if source.error is not None:
                    raise source.error from None
                self._pool.check_cancelled()
                raise
            else:
                self._reached = True
                return response
            finally:
                await source.close()

    @asynccontextmanager
    async def stream(
        self, method: Callable[[Connection], Callable[..., Any]], request: Any, context: CallContext
    ) -> AsyncIterator[Stream]:
        """One attempt of a server-streaming call, without a deadline; it is cancelled on the way out.

        Raises:
            CallFailed: while it is iterated.
        """
        with self._pool.connection() as connection:
            call = method(connection)(request, timeout=None, metadata=context.metadata)
            try:
                yield Stream(call, context, self.reached)
            except asyncio.CancelledError:
                self._pool.check_cancelled()
                raise
            finally:
                call.cancel()

    @asynccontextmanager
    async def dialogue(
        self, method: Callable[[Connection], Callable[..., Any]], context: CallContext
    ) -> AsyncIterator[Dialogue]:
        """One attempt of a call with requests and answers at once, without a deadline; cancelled on the way out."""
        with self._pool.connection() as connection:
            call = method(connection)(timeout=None, metadata=context.metadata)
            try:
                yield Dialogue(call, context)
            except asyncio.CancelledError:
                self._pool.check_cancelled()
                raise
            finally:
                call.cancel()

    def reached(self) -> None:
        """Note that the platform answered."""
        self._reached = True

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()


class Source:
    """Feeds a call's requests and keeps the error of the iterator, which gRPC would turn into a bare cancellation."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        # gRPC takes requests in a task of its own, which may be in the middle of a step when the call is over.
        self._step = asyncio.Lock()
        self.error: BaseException | None = None

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Any:
        async with self._step:
            try:
                return await anext(self._requests)
            except Exception as error:
                if not isinstance(error, StopAsyncIteration):
                    self.error = error
                raise

    async def close(self) -> None:
        """Close the iterator once its step is done: gRPC has cancelled that, or it only reads what is local."""
        async with self._step:
            close = getattr(self._requests, "aclose", None)
            if close is not None:
                await close()


def _cause(message: str) -> str:
    """The end of gRPC's own chain of causes, such as "Connection refused"."""
    return message.rpartition(": ")[2] or message
