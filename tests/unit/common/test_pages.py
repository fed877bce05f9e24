import pytest

from services.common.errors import InvalidArgumentError
from services.common.pages import decode_token, encode_token


def test_a_position_survives_the_trip() -> None:
    assert decode_token("page_token", encode_token((5, "é/..")), (int, str)) == (5, "é/..")


@pytest.mark.parametrize(
    "token", ["x", "!!!", "é", encode_token(("a", 1)), encode_token((1,)), "bnVsbA", "e30", "A" * 5]
)
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgumentError, match="page_token"):
        decode_token("page_token", token, (int, str))
