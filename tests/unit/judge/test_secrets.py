"""What is said of a judge has no secrets; texts of models and servers can always be sent."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from orchard.rewards.scores import Abstained
from pydantic import ValidationError

from services.judge.backends.settings import HIDDEN, JudgeSettings
from services.judge.codec import verdict_json
from services.judge.model import Aggregation, Kind, Parameters, Provenance, Reading, Usage, Verdict, Vote
from services.judge.servicer_values import verdict_message


def settings(**given: Any) -> JudgeSettings:
    return JudgeSettings(**({"name": "j", "kind": "openai", "model": "m", "base_url": "http://localhost/v1"} | given))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:s3cret@host:8443/v1", "https://host:8443/v1"),
        ("https://s3cret@host/v1?api-version=1&key=s3cret#s3cret", "https://host/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
    ],
)
def test_an_address_is_shown_without_user_and_query(url: str, shown: str) -> None:
    found = settings(base_url=url).described()
    assert found["base_url"] == shown
    assert "s3cret" not in json.dumps(found)


def test_fields_that_are_named_like_keys_are_hidden_wherever_they_stand() -> None:
    secret = {"api_key": "s3cret", "Authorization": "s3cret", "headers": [{"X-Auth-Token": "s3cret"}]}
    secret |= {"provider": {"client_secret": "s3cret", "password": ["s3cret"]}, "how": "Bearer s3cret"}
    plain = {"max_tokens": 5, "tokenizer": "t", "top_k": 3, "provider": {"order": ["a"]}}
    found = settings(extra_body=secret | {"plain": plain}).described()
    assert "s3cret" not in json.dumps(found)
    assert found["extra_body"]["plain"] == plain
    assert found["extra_body"]["api_key"] == HIDDEN


@pytest.mark.parametrize("value", ["NaN", "-Infinity", '"\\ud800"', '{"deep": [1e999]}'])
def test_fields_that_cannot_be_sent_are_refused_before_anything_is(value: str) -> None:
    with pytest.raises(ValidationError, match="extra_body"):
        settings(extra_body={"x": json.loads(value)})


def test_other_judges_stay_other_judges() -> None:
    """The hash that verdicts are found by is of all that was configured."""
    assert settings(extra_body={"seed_token": 1}).identity() != settings(extra_body={"seed_token": 2}).identity()


def test_any_text_of_a_model_can_be_sent_and_stored() -> None:
    odd = "half \ud800 and \0"
    reading = Reading(Abstained("JUDGE_ABSTAINED"), odd, reasoning=odd)
    parameters = Parameters(1, Aggregation.MAJORITY, 1, None, 100)
    provenance = Provenance("[]", parameters, "outcome/2", "", 0, "", "0" * 64, (), ())
    votes = (Vote("j", odd, reading),)
    verdict = Verdict(
        "vd-1", Kind.OUTCOME, reading, None, votes, provenance, Usage(), 0.0, datetime(2026, 1, 1, tzinfo=UTC)
    )
    message = verdict_message(verdict)
    message.SerializeToString()
    assert message.message == message.votes[0].message == message.votes[0].model == "half ? and \ufffd"
    stored = json.dumps(verdict_json(verdict))
    assert "\\ud800" not in stored
    assert "\\u0000" not in stored
