import pytest

from services.gateway.settings import Endpoint, parse_endpoints


def test_endpoints_are_read() -> None:
    found = parse_endpoints("llm=127.0.0.1:8000, search=search.internal:443 ,v6=[::1]:80")
    assert found == {
        "llm": Endpoint("127.0.0.1", 8000),
        "search": Endpoint("search.internal", 443),
        "v6": Endpoint("::1", 80),
    }
    assert parse_endpoints("") == {}


@pytest.mark.parametrize(
    "text", ["llm", "llm=", "=h:1", "llm=host", "llm=host:0", "llm=host:65536", "LLM=h:1", "a b=h:1", "l=http://h:1"]
)
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no name=host:port"):
        parse_endpoints(f"good=h:1,{text}")


def test_a_name_is_there_once() -> None:
    with pytest.raises(ValueError, match="'llm' is there twice"):
        parse_endpoints("llm=a:1,llm=b:1")
