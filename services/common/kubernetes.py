"""The client of a Kubernetes API server: from a kubeconfig, or from the Pod that this process runs in.

Credentials are read again every minute and after a refusal: tokens of Pods are replaced on disk while they run. That
works through a hook of the client's Configuration, which must never be copied: a copy keeps the token of its day.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from kubernetes_asyncio.client import ApiClient, Configuration
from kubernetes_asyncio.config import load_incluster_config, load_kube_config

from services.common.logs import get_logger
from services.common.settings import SettingsError

_log = get_logger(__name__)

_REREAD_SECONDS: Final = 60.0
_USER_AGENT: Final = "orchard"
_READ_BYTES: Final = 2 << 20  # above the largest object, as the client's own session has it


class KubernetesConfigError(SettingsError):
    """The API server or the credentials for it are not known; the message says what to set."""


class KubernetesClient:
    """One ApiClient with connections of its own. Watches and other calls each use another one."""

    def __init__(self, kubeconfig: Path | None, configuration: Configuration) -> None:
        self._kubeconfig = kubeconfig
        self._configuration = configuration
        self._reread_at = time.monotonic() + _REREAD_SECONDS
        configuration.refresh_api_key_hook = self._refresh
        self.api = ApiClient(configuration)
        self.api.user_agent = _USER_AGENT
        _use_environment_once(self.api.rest_client, configuration.host or "")

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, *, connections: int = 100) -> Self:
        """A client by a kubeconfig file's current context, or by the Pod's service account where it is None.

        At most `connections` requests are under way at once; more wait.

        Raises:
            KubernetesConfigError: the file cannot be used, or this process runs in no Pod.
        """
        configuration = Configuration()
        configuration.connection_pool_maxsize = connections
        await _load(kubeconfig, configuration)
        return cls(kubeconfig, configuration)

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """Send a request as it is, without the work that typed objects cost. The response is a context manager.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: there is no answer; the server may have heard.
        """
        rest = self.api.rest_client
        asked = {"User-Agent": _USER_AGENT, **(headers or {})}
        await self.api.update_params_for_auth(asked, [], ["BearerToken"])
        more: dict[str, Any] = {"server_hostname": rest.server_hostname} if rest.server_hostname else {}
        response: aiohttp.ClientResponse = await rest.pool_manager.request(
            method,
            f"{self._configuration.host}{path}" + (f"?{urlencode(query)}" if query else ""),
            headers=asked,
            data=body,
            timeout=timeout or aiohttp.ClientTimeout(),
            proxy=rest.proxy,
            proxy_headers=rest.proxy_headers,
            **more,
        )
        return response

    def forget_credentials(self) -> None:
        """Read them again before the next request, since the server refused them."""
        self._reread_at = 0.0

    async def close(self) -> None:
        """Close every connection."""
        await self.api.close()

    async def _refresh(self, configuration: Configuration) -> None:
        now = time.monotonic()
        if now < self._reread_at:
            return
        self._reread_at = now + _REREAD_SECONDS
        try:
            await _load(self._kubeconfig, configuration)
        except KubernetesConfigError as error:
            # The ones in hand may still be good; if not, the server says so.
            _log.warning("credentials could not be read again", why=str(error))


def _use_environment_once(rest: Any, host: str) -> None:
    """Heed the environment's proxy from now on, without looking for it again.

    The client's session reads the environment and ~/.netrc before each request, in two threads: half of what a request
    costs. No API server has its credentials in a .netrc.
    """
    old = rest.pool_manager
    where = urlsplit(host)
    if rest.proxy is None and not proxy_bypass(where.hostname or ""):
        rest.proxy = getproxies().get(where.scheme)
    rest.pool_manager = aiohttp.ClientSession(connector=old.connector, read_bufsize=_READ_BYTES)
    old.detach()


async def _load(kubeconfig: Path | None, configuration: Configuration) -> None:
    try:
        if kubeconfig is None:
            load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call]
        else:
            # The loader would only say that it found no context.
            kubeconfig.read_bytes()  # noqa: ASYNC240 (small, and once a minute)
            await load_kube_config(
                config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
            )
    except Exception as error:
        # The loaders raise whatever broken YAML, a missing key or a plugin led to.
        where = (
            f"kubeconfig {kubeconfig} cannot be used"
            if kubeconfig is not None
            else "this process runs in no Pod with a service account; set ORCHARD_KUBECONFIG to a kubeconfig file"
        )
        raise KubernetesConfigError(f"{where}: {error}") from error
    token = configuration.api_key.get("BearerToken")
    if token is not None:
        # Token files often end with a newline, which no header may have.
        configuration.api_key["BearerToken"] = token.strip()
