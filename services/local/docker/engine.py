"""The Docker Engine API over its Unix socket: the dozen calls that sandboxes need, as plain values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

OLDEST_API: Final = (1, 41)
"""Of Docker 20.10; Podman 4 speaks it too."""
_NEWEST_API: Final = (1, 47)
DEFAULT_HOST: Final = "unix:///var/run/docker.sock"

_CONNECT_SECONDS: Final = 5.0
_CALL_SECONDS: Final = 60.0
_PING_SECONDS: Final = 5.0
_LINE_BYTES: Final = 1 << 20  # of one event, or one line of a pull's progress
_LOG_BYTES: Final = 16 << 10


class EngineError(Exception):
    """The engine refuses; `status` is HTTP's, the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineAwayError(Exception):
    """The engine does not answer; the message says what to do."""


class EngineForbiddenError(EngineAwayError):
    """This user may not ask it."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine is.

    Attributes:
        name: product and version, for people.
        architecture: of its machine, as uname says.
        cgroup_version: "1" or "2"; empty: it limits nothing.
        remaps_users: a container's root is another user of the machine.
        networks: whether containers can have a network of their own that leads out.
    """

    name: str
    architecture: str
    cgroup_version: str
    remaps_users: bool
    networks: bool


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """An image that the engine has.

    Attributes:
        id: of its configuration, sha256:...
        working_directory: WORKDIR; empty: none.
        user: USER; empty: root.
    """

    id: str
    working_directory: str
    user: str


@dataclass(frozen=True, slots=True)
class Container:
    """A container as it is now.

    Attributes:
        id: the engine's.
        name: without the slash.
        labels: as they were given.
        status: "created", "running", "paused", "restarting", "removing", "exited" or "dead".
        exit_code: once it has ended.
        out_of_memory: the kernel ended something of it for lack of memory.
    """

    id: str
    name: str
    labels: Mapping[str, str]
    status: str
    exit_code: int = 0
    out_of_memory: bool = False

    @property
    def lives(self) -> bool:
        """Whether its processes are there, or may come."""
        return self.status in ("created", "running", "paused", "restarting")


def socket_of(host: str) -> Path:
    """The Unix socket of a DOCKER_HOST.

    Raises:
        ValueError: it names something else. Folders of this machine are mounted, so the engine must be on it.
    """
    scheme, _, path = host.partition("://")
    if scheme != "unix" or not path.startswith("/"):
        raise ValueError(
            f"DOCKER_HOST is {host!r}: the docker runtime needs an engine on this machine; "
            "give unix:///path/to/docker.sock, or unset it"
        )
    return Path(path)


class Engine:
    """One engine. Use `connected`.

    Every method raises EngineAwayError where the engine does not answer and EngineError where it refuses.
    """

    def __init__(self, session: aiohttp.ClientSession, socket: Path) -> None:
        self._session = session
        self._socket = socket
        self._version = ""

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, socket: Path) -> AsyncIterator[Engine]:
        """An engine at a socket, which need not be there yet."""
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=_CALL_SECONDS, sock_connect=_CONNECT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=_LINE_BYTES) as session:
            yield cls(session, socket)

    async def describe(self) -> EngineFacts:
        """What it is; also finds the version of the API to speak, so it must come first.

        Raises:
            EngineError: it is too old, or not Linux.
        """
        version = await self._json("GET", "/version")
        newest, oldest = _version(version["ApiVersion"]), _version(version.get("MinAPIVersion") or "1.0")
        ours = min(newest, _NEWEST_API)
        name = f"{(version.get('Platform') or {}).get('Name') or 'engine'} {version.get('Version', '')}".strip()
        if ours < OLDEST_API or oldest > _NEWEST_API:
            raise EngineError(
                0,
                f"{name} speaks version {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} of Docker's API, and "
                f"{OLDEST_API[0]}.{OLDEST_API[1]} (Docker 20.10) to {_NEWEST_API[0]}.{_NEWEST_API[1]} are needed",
            )
        self._version = f"/v{ours[0]}.{ours[1]}"
        info = await self._json("GET", "/info")
        if info.get("OSType") != "linux":
            raise EngineError(0, f"{name} runs containers of {info.get('OSType')}: sandboxes need Linux")
        options = [str(option) for option in info.get("SecurityOptions") or ()]
        networks = await self._json("GET", "/networks")
        return EngineFacts(
            name=name,
            architecture=str(info.get("Architecture", "")),
            cgroup_version=str(info.get("CgroupVersion") or "1") if info.get("MemoryLimit", True) else "",
            remaps_users=any(option.startswith("name=userns") for option in options),
            networks=any(network.get("Name") == "bridge" for network in networks),
        )

    # Images

    async def image(self, reference: str) -> ImageFacts | None:
        """An image that it has; None: it has none of that name."""
        try:
            found = await self._json("GET", f"/images/{reference}/json")
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        config = found.get("Config") or {}
        return ImageFacts(str(found["Id"]), str(config.get("WorkingDir") or ""), str(config.get("User") or ""))

    async def pull(self, reference: str, credentials: str) -> None:
        """Have it pull an image, however long that takes. `credentials`: the header X-Registry-Auth, or nothing.

        Raises:
            EngineError: it cannot; the message says why.
        """
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        endless = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        async with self._request(
            "POST", "/images/create", params={"fromImage": reference}, headers=headers, timeout=endless
        ) as response:
            async for line in self._lines(response):
                # What goes wrong after the first byte is told within the stream.
                if "error" in line:
                    code = (line.get("errorDetail") or {}).get("code") or 0
                    raise EngineError(int(code), str(line["error"]))

    # Containers

    async def create(self, name: str, configuration: Mapping[str, Any]) -> str:
        """Make a container; gives its id."""
        made = await self._json("POST", "/containers/create", params={"name": name}, body=configuration)
        return str(made["Id"])

    async def start(self, container: str) -> None:
        """Start a container."""
        await self._done("POST", f"/containers/{container}/start")

    async def inspect(self, container: str) -> Container | None:
        """A container by id or name; None: there is none."""
        try:
            found = await self._json("GET", f"/containers/{container}/json")
        except EngineError as error:
            if error.status == 404:
                return None
            raise
        state = found["State"]
        return Container(
            id=str(found["Id"]),
            name=str(found["Name"]).lstrip("/"),
            labels=(found.get("Config") or {}).get("Labels") or {},
            status=str(state["Status"]),
            exit_code=int(state.get("ExitCode") or 0),
            out_of_memory=bool(state.get("OOMKilled")),
        )

    async def containers(self, label: str) -> list[Container]:
        """All with a label "key=value", those that have ended too."""
        query = {"all": "true", "filters": json.dumps({"label": [label]})}
        listed = await self._json("GET", "/containers/json", params=query)
        return [
            Container(
                id=str(one["Id"]),
                name=str((one.get("Names") or [""])[0]).lstrip("/"),
                labels=one.get("Labels") or {},
                status=str(one["State"]),
            )
            for one in listed
        ]

    async def remove(self, container: str) -> bool:
        """End a container and remove it with its volumes; False: there is none, or it is being removed already."""
        try:
            await self._done("DELETE", f"/containers/{container}", params={"force": "true", "v": "true"})
        except EngineError as error:
            if error.status in (404, 409):
                return False
            raise
        return True

    async def log_of(self, container: str, lines: int) -> str:
        """The last lines that its first process wrote; empty where there is no log."""
        query = {"stdout": "true", "stderr": "true", "tail": str(lines)}
        try:
            async with self._request("GET", f"/containers/{container}/logs", params=query) as response:
                data = await _beginning(response.content)
        except EngineError:
            return ""
        return _without_frames(data).decode(errors="replace").strip()

    @contextlib.asynccontextmanager
    async def events(self, label: str) -> AsyncIterator[AsyncIterator[str]]:
        """Ids of containers with a label that end or are removed from now on; ends when the engine does."""
        filters = {"label": [label], "type": ["container"], "event": ["die", "destroy"]}
        endless = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        async with self._request(
            "GET", "/events", params={"filters": json.dumps(filters)}, timeout=endless
        ) as response:

            async def ends() -> AsyncIterator[str]:
                async for line in self._lines(response):
                    yield str((line.get("Actor") or {}).get("ID", ""))

            yield ends()

    async def serves_others(self) -> bool:
        """Whether somebody who comes now is answered. One that is being stopped first turns new connections away."""
        try:
            async with asyncio.timeout(_PING_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                try:
                    writer.write(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
                    return bool(await reader.read(1))
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    # HTTP

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        url = f"http://engine{self._version}{path}"
        try:
            async with self._session.request(
                method, url, params=params, headers=headers, json=body, **options
            ) as response:
                if response.status >= 400:
                    raise EngineError(response.status, _message(await _beginning(response.content)))
                yield response
        except aiohttp.ClientConnectorError as error:
            raise self._away(error) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineAwayError(f"the engine at {self._socket} broke off: {error}") from None
        except TimeoutError:
            raise EngineAwayError(f"the engine at {self._socket} did not answer {method} {path} in time") from None

    def _away(self, error: aiohttp.ClientConnectorError) -> EngineAwayError:
        cause = error.os_error
        if isinstance(cause, PermissionError) or (self._socket.exists() and not os.access(self._socket, os.W_OK)):
            return EngineForbiddenError(
                f"this user may not use the engine's socket {self._socket}: add the user to its group "
                "(usermod -aG docker USER, then log in again), or use a rootless engine"
            )
        return EngineAwayError(
            f"no engine answers at {self._socket} ({cause.strerror or cause}): start it, or set DOCKER_HOST to the "
            "socket of one that runs"
        )

    async def _json(self, method: str, path: str, **options: Any) -> Any:
        async with self._request(method, path, **options) as response:
            return await response.json(content_type=None)

    async def _done(self, method: str, path: str, **options: Any) -> None:
        async with self._request(method, path, **options) as response:
            await response.read()

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
        while True:
            try:
                line = await response.content.readline()
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineAwayError(f"the engine at {self._socket} broke off: {error}") from None
            except ValueError:
                raise EngineAwayError(f"the engine at {self._socket} sent a line that is too long") from None
            if not line:
                return
            if line.strip():
                yield json.loads(line)


async def wait_for(engine: Engine, seconds: float) -> EngineFacts:
    """What the engine is, as soon as it answers.

    Raises:
        EngineAwayError: it does not within that time.
        EngineError: see Engine.describe.
    """
    end = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await engine.describe()
        except EngineForbiddenError:
            raise
        except EngineAwayError:
            if asyncio.get_running_loop().time() >= end:
                raise
        await asyncio.sleep(0.1)


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    data = b""
    while len(data) < _LOG_BYTES and (more := await content.read(_LOG_BYTES - len(data))):
        data += more
    return data


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or "no reason given"


def _without_frames(data: bytes) -> bytes:
    """The text of a log in the engine's frames: stream (1 byte), three zeros, size (4, big-endian), text."""
    text = b""
    while len(data) >= 8:
        size = int.from_bytes(data[4:8], "big")
        text += data[8 : 8 + size]
        data = data[8 + size :]
    return text
