"""Bytes to text, one incremental UTF-8 decoder for each stream."""

from __future__ import annotations

import codecs
from collections.abc import Iterable


class StreamDecoders:
    """Decodes chunks of several streams; a character that is split over two chunks of a stream comes whole with the
    later one.
    """

    def __init__(self) -> None:
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def decode(self, stream: str, data: bytes) -> str:
        """The text that `data` completes."""
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(data)

    def finish(self) -> Iterable[tuple[str, str]]:
        """(stream, text) for each stream that ended within a character."""
        for stream, decoder in self._decoders.items():
            rest = decoder.decode(b"", final=True)
            if rest:
                yield stream, rest


def decode_in_order(chunks: Iterable[tuple[str, bytes]]) -> str:
    """The text of interleaved streams, in order."""
    decoders = StreamDecoders()
    parts = [decoders.decode(stream, data) for stream, data in chunks]
    parts.extend(text for _stream, text in decoders.finish())
    return "".join(parts)
