"""Patches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from orchard._client import errors
from orchard._client.convert import patch_file
from orchard._client.files import AsyncFiles, unknown
from orchard._client.transport import Retry
from orchard._client.types import PatchResult
from orchard.exec.v1 import file_service_pb2

_BLOCK: Final = 256 << 10


class AsyncPatches(AsyncFiles):
    """The method of a sandbox that applies patches."""

    async def apply_patch(
        self,
        diff: str | bytes,
        *,
        path: str = ".",
        strip: int = 1,
        reverse: bool = False,
        dry_run: bool = False,
        fuzz: int = 0,
        partial: bool = False,
        check: bool = True,
    ) -> PatchResult:
        """Apply a unified or git diff: all of it or, by default, nothing. Needs neither git nor patch in the sandbox.

        Args:
            diff: the patch, at most 64 MiB.
            path: the directory that its paths start at.
            strip: leading path components to strip.
            reverse: undo it.
            dry_run: report without changing anything.
            fuzz: context lines at either end that may differ, 0 to 3.
            partial: apply the hunks that fit even if others do not.
            check: raise if anything does not fit.

        Raises:
            PatchFailed: with check; `result` says which hunk and why.
            InvalidArgument: it is no patch (PATCH_MALFORMED), or names a file outside of `path`.
            OutcomeUnknown: with `partial`, the connection broke; otherwise a patch that is found applied after that
                counts as applied by this call.
        """
        start = file_service_pb2.ApplyPatchStart(
            path=path, strip=strip, reverse=reverse, dry_run=dry_run, fuzz=fuzz, partial=partial
        )
        result = await self._apply(diff.encode() if isinstance(diff, str) else bytes(diff), start)
        if check and not result.applied:
            problems = list(result.problems())
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise errors.PatchFailed("the patch does not fit: " + "; ".join(problems[:3]) + more, result=result)
        return result

    async def _apply(self, data: bytes, start: file_service_pb2.ApplyPatchStart) -> PatchResult:
        retry = self._transport.retry()
        while True:
            attempt = Retry(0.0)
            try:
                return await self._apply_once(data, start, attempt)
            except errors.Unavailable as error:
                may_be_applied = attempt.may_have_acted and not start.dry_run
                if may_be_applied and start.partial:
                    raise unknown("a partial patch may have been applied", error) from error
                if not await retry.failed(0.0):
                    raise
            if may_be_applied and (applied := await self._was_applied(data, start)) is not None:
                return applied

    async def _was_applied(self, data: bytes, start: file_service_pb2.ApplyPatchStart) -> PatchResult | None:
        """The report of an attempt whose answer was lost, if it applied the patch: then the patch fits in reverse and
        no longer forwards.
        """
        probe = file_service_pb2.ApplyPatchStart()
        probe.CopyFrom(start)
        probe.dry_run = True
        if (await self._apply_once(data, probe, self._transport.retry())).applied:
            return None
        probe.reverse = not start.reverse
        backwards = await self._apply_once(data, probe, self._transport.retry())
        return backwards if backwards.applied else None

    async def _apply_once(self, data: bytes, start: file_service_pb2.ApplyPatchStart, retry: Retry) -> PatchResult:
        async def requests() -> AsyncIterator[file_service_pb2.ApplyPatchRequest]:
            yield file_service_pb2.ApplyPatchRequest(sandbox_id=self._sandbox_id, start=start)
            for offset in range(0, len(data), _BLOCK):
                yield file_service_pb2.ApplyPatchRequest(data=data[offset : offset + _BLOCK])
            yield file_service_pb2.ApplyPatchRequest(end=True)

        with self._transport.operation("ApplyPatch", sandbox_id=self._sandbox_id) as operation:
            response = await self._transport.upload(
                lambda c: c.file.ApplyPatch,
                requests,
                sandbox_id=self._sandbox_id,
                context=self._transport.context(operation),
                retry=retry,
            )
        return PatchResult(response.applied, tuple(patch_file(file) for file in response.files))
