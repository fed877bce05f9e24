"""A server that runs inside a sandbox with nothing but Python: `python3 port_server.py KIND PORT`.

Prints "listening" once it does. Kinds: echo; digest answers with size and hash of all that it was sent, at its end;
count with the size alone; http; websocket echoes text messages; flood sends for ever, and tells at /tmp/flooded what
the kernel took; reset breaks each connection after its first byte; zeros sends as many as the first line says.
"""

import asyncio
import base64
import hashlib
import pathlib
import socket
import struct
import sys

_WEBSOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3


async def echo(reader, writer):
    while data := await reader.read(1 << 18):
        writer.write(data)
        await writer.drain()


async def digest(reader, writer):
    found, size = hashlib.sha256(), 0
    while data := await reader.read(1 << 18):
        found.update(data)
        size += len(data)
    writer.write(f"{size} {found.hexdigest()}\n".encode())


async def count(reader, writer):
    size = 0
    while data := await reader.read(1 << 18):
        size += len(data)
    writer.write(f"{size}\n".encode())


async def http(reader, writer):
    """Two requests of a connection may follow each other; the body is the path."""
    while request := await _head(reader):
        path = request.split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(path), path))
        await writer.drain()


async def websocket(reader, writer):
    request = await _head(reader)
    key = next(line.split(b": ")[1] for line in request.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + _WEBSOCKET).digest())
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n")
    writer.write(b"sec-websocket-accept: %s\r\n\r\n" % accept)
    while True:
        first, size = await reader.readexactly(2)
        size &= 0x7F
        if size == 126:
            (size,) = struct.unpack(">H", await reader.readexactly(2))
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(await reader.readexactly(size)))
        writer.write(bytes([first, 126]) + struct.pack(">H", size) + data)
        await writer.drain()
        if first & 0x0F == 8:  # close
            return


async def flood(reader, writer):
    writer.transport.set_write_buffer_limits(high=0)
    sent = 0
    while True:
        writer.write(bytes(1 << 18))
        await writer.drain()
        sent += 1 << 18
        pathlib.Path("/tmp/flooded").write_text(str(sent))


async def reset(reader, writer):
    await reader.read(1)
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def zeros(reader, writer):
    left = int(await reader.readline())
    block = bytes(1 << 20)
    while left:
        writer.write(block[:left])
        await writer.drain()
        left -= min(left, len(block))


async def _head(reader):
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


async def main():
    handler = globals()[sys.argv[1]]

    async def serve(reader, writer):
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[2]), backlog=256)
    print("listening", flush=True)
    await server.serve_forever()


asyncio.run(main())
