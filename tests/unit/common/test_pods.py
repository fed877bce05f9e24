import base64
import os
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.pods import pack_spec, pod_name, unpack_spec

DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


@given(st.binary(max_size=5000))
def test_a_packed_spec_comes_back(spec: bytes) -> None:
    assert unpack_spec(pack_spec(spec)) == spec


@pytest.mark.parametrize(
    "annotation",
    [
        "",
        "no base64!",
        "é",
        base64.b64encode(b"not compressed").decode(),
        base64.b64encode(zlib.compress(os.urandom(100))[:-10]).decode(),
        base64.b64encode(zlib.compress(bytes(64 << 20))).decode(),
    ],
)
def test_what_is_no_packed_spec_is_a_value_error(annotation: str) -> None:
    with pytest.raises(ValueError, match="packed spec|ASCII"):
        unpack_spec(annotation)


def test_names_of_pods_are_valid_and_differ_by_tenant_and_id() -> None:
    names = {pod_name(*name) for name in (("a", "b"), ("a", "c"), ("ab", "b"), ("a" * 63, "b" * 63))}
    assert len(names) == 4
    assert all(DNS_LABEL.match(name) for name in names)
