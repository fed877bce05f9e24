"""The gateway's address: what the user gave, checked and reserved before anything starts."""

from __future__ import annotations

import errno
import random
import socket
from dataclasses import dataclass, field
from typing import Final

from services.local.supervisor.errors import PlatformError, UsageError

DEFAULT_LISTEN: Final = "127.0.0.1:7411"
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 (compared with)
# Below the range from which the kernel takes ports of outgoing connections: none takes it while the gateway starts.
_FREE_PORTS: Final = range(20_000, 32_000)
_TRIES: Final = 200


@dataclass(frozen=True, slots=True)
class Listen:
    """An address that is the gateway's until `close`.

    Attributes:
        address: where the gateway listens.
        endpoint: where clients on this machine find it.
        beyond_this_machine: whether others can reach it.
        reserved: bound and never listening: the gateway, which sets SO_REUSEADDR, can bind beside it, also when it is
            started again, and nobody who looks for a free port is given this one.
    """

    address: str
    endpoint: str
    beyond_this_machine: bool
    reserved: socket.socket = field(repr=False, compare=False)

    def close(self) -> None:
        """Let others have it."""
        self.reserved.close()


def choose_listen(text: str) -> Listen:
    """Check "host:port"; port 0 takes a free one, which then stays the same for the platform's life.

    Raises:
        UsageError: it is not an address.
        PlatformError: it is not of this machine, or in use.
    """
    host, separator, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not digits.isascii() or not digits.isdigit() or int(digits) > 65_535:
        raise UsageError(f"--listen: {text!r} is not host:port with a port from 0 to 65535, such as {DEFAULT_LISTEN}")
    try:
        family, _, _, _, target = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)[0]  # noqa: S104
    except (OSError, UnicodeError):
        raise PlatformError(f"--listen: there is no host {host!r}") from None
    ip = str(target[0])
    reserved = _bind(family, ip, int(digits)) if int(digits) else _free_port(family, ip)
    port = int(reserved.getsockname()[1])
    reachable = ip in _WILDCARDS or not (ip.startswith("127.") or ip == "::1")
    return Listen(_join(ip, port), _join(_WILDCARDS.get(ip, ip), port), reachable, reserved)


def _join(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _free_port(family: socket.AddressFamily, ip: str) -> socket.socket:
    for _ in range(_TRIES):
        port = random.choice(_FREE_PORTS)  # noqa: S311 (nothing secret)
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Refused also where another has reserved it.
            reserved.bind((ip, port))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            reserved.close()
        else:
            return reserved
    raise PlatformError(f"--listen: found no free port on {ip}")


def _bind(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    try:
        with _bound(family, ip, port) as probe:
            probe.listen(1)
        return _bound(family, ip, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PlatformError(
                f"port {port} on {ip} is in use: stop what listens there, or choose another with --port (0: any free "
                "one) or --listen"
            ) from None
        if error.errno == errno.EACCES:
            raise PlatformError(f"port {port} needs privileges: choose one above 1023 with --port") from None
        raise PlatformError(f"--listen: cannot listen on {ip}: {error.strerror}") from None


def _bound(family: socket.AddressFamily, ip: str, port: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier gateway that still fade away are not in the way.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((ip, port))
    except OSError:
        bound.close()
        raise
    return bound
