import socket
from contextlib import closing

import grpc.aio
import pytest

from services.local.supervisor.errors import PlatformError
from services.local.supervisor.listen import choose_listen


@pytest.mark.parametrize(
    "text", ["", "7411", "localhost", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:٣"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(PlatformError, match="--listen"):
        choose_listen(text)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(PlatformError, match=r"no host 'no-such-host\.invalid'"):
        choose_listen("no-such-host.invalid:1")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PlatformError, match=r"cannot listen on 192\.0\.2\.1"):
        choose_listen("192.0.2.1:7411")


def test_port_zero_becomes_a_port_that_is_free() -> None:
    chosen = choose_listen("127.0.0.1:0")
    port = int(chosen.address.rpartition(":")[2])
    assert port > 1023
    assert chosen.endpoint == chosen.address == f"127.0.0.1:{port}"
    assert not chosen.beyond_this_machine
    chosen.close()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


@pytest.mark.parametrize("given", [False, True])
async def test_what_was_chosen_is_the_gateways_until_it_is_let_go(monkeypatch: pytest.MonkeyPatch, given: bool) -> None:
    """Nobody else is given it before the gateway listens, or while it is started again."""
    chosen = choose_listen("127.0.0.1:0")
    port = int(chosen.address.rpartition(":")[2])
    monkeypatch.setattr("services.local.supervisor.listen._FREE_PORTS", range(port, port + 1))
    if given:
        chosen, first = choose_listen(chosen.address), chosen
        first.close()
    with closing(chosen):
        for _ in range(2):
            with pytest.raises(PlatformError, match="found no free port"):
                choose_listen("127.0.0.1:0")
            gateway = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            assert gateway.add_insecure_port(chosen.address) == port
            await gateway.start()
            with pytest.raises(PlatformError, match="is in use"):
                choose_listen(chosen.address)
            await gateway.stop(None)
    with closing(choose_listen("127.0.0.1:0")) as another:
        assert another == chosen


def test_a_port_in_use_names_the_flag() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        with pytest.raises(PlatformError, match=rf"port {port} on 127\.0\.0\.1 is in use.*--port.*--listen"):
            choose_listen(f"127.0.0.1:{port}")


def test_clients_of_a_wildcard_use_the_loopback() -> None:
    chosen = choose_listen("0.0.0.0:0")
    assert chosen.address.startswith("0.0.0.0:")
    assert chosen.endpoint.startswith("127.0.0.1:")
    assert chosen.beyond_this_machine
    chosen.close()
