import base64
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
