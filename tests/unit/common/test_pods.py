import base64
import zlib

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods


def test_a_name_is_of_the_pair_and_fits_every_object() -> None:
    names = {pods.pod_name("a", "b-c"), pods.pod_name("a-b", "c"), pods.pod_name("a", "b"), pods.pod_name("b", "a")}
    assert len(names) == 4
    assert all(len(name) <= 63 for name in names)


@given(st.binary(max_size=4096))
def test_a_spec_comes_back_from_its_annotation(spec: bytes) -> None:
    annotation = pods.encode_spec(spec)
    assert annotation.isascii()
    assert pods.decode_spec(annotation) == spec


@pytest.mark.parametrize(
    "annotation",
    [
        "",
        "not base64!",
        base64.b64encode(b"not compressed").decode(),
        base64.b64encode(zlib.compress(b"spec")[:-1]).decode(),
        base64.b64encode(zlib.compress(bytes(64 << 20))).decode(),
    ],
    ids=["empty", "text", "plain", "cut", "bomb"],
)
def test_what_is_no_spec_is_said_so(annotation: str) -> None:
    with pytest.raises(ValueError, match=r"orchard\.dev/spec"):
        pods.decode_spec(annotation)


def test_patience_is_the_specs_or_the_contracts_default() -> None:
    spec = sandbox_pb2.SandboxSpec(
        start_timeout=Duration(seconds=5), pull_timeout=Duration(seconds=7, nanos=500_000_000)
    )
    assert pods.patience_of(spec.SerializeToString()) == (5.0, 7.5)
    assert pods.patience_of(b"") == (60.0, 900.0)
    with pytest.raises(ValueError, match=pods.SPEC):
        pods.patience_of(b"\xff")
