"""Mistakes of a caller, each told with what to do instead."""

from __future__ import annotations

import logging
import re
import tempfile
from typing import Any

import msgspec
import pydantic
import pytest

from edda import EddaApp, RetryPolicy
from edda.cli.doctor import _remedy
from edda.cloudevents.event import CloudEvent
from edda.core.codec import Codec
from edda.core.event_match import describe
from edda.core.redact import Redaction
from edda.core.validation import ValidationFailure, validate
from edda.engine.tasks import Backoff
from edda.errors import AppError, EventValidationError, PayloadError, StorageUnavailableError
from edda.workflow.events import to_received_event


class Paid(pydantic.BaseModel):
    amount: float


@pytest.mark.parametrize("name", ["shop.db", "data/shop.sqlite3"])
def test_the_name_of_a_file_is_answered_with_its_url(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"for this file it is sqlite:///{name}")):
        EddaApp("shop", name)


@pytest.mark.parametrize(
    "url", ["mysql://root@127.0.0.1/", "mariadb://root@127.0.0.1", "postgres://", "postgresql:///"]
)
def test_a_url_that_names_no_database_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"no database is named; expected (mysql|postgresql)://user@host/DATABASE"):
        EddaApp("shop", url)


@pytest.mark.parametrize("name", ["max_retries", "retries", "attempts"])
def test_names_of_other_libraries_are_known(name: str) -> None:
    given: Any = {name: 3}
    with pytest.raises(TypeError, match="did you mean 'max_attempts'"):
        RetryPolicy(**given)


def test_an_open_file_is_not_called_a_list() -> None:
    with tempfile.TemporaryFile() as file, pytest.raises(PayloadError, match="store its path or what it contains"):
        Codec().encode({"scan": file})


@pytest.mark.parametrize(("error", "told"), [(TimeoutError(), "(TimeoutError)"), (TimeoutError("slow"), "(slow)")])
def test_an_error_without_a_text_is_told_by_its_class(
    error: Exception, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    Backoff().warn(logging.getLogger("test"), "heartbeat of %s failed (%s), trying again", "w1", error)
    assert caplog.messages == [f"heartbeat of w1 failed {told}, trying again"]


@pytest.mark.parametrize(
    ("url", "error", "remedy"),
    [
        ("postgresql://h/d", AppError("postgres databases need the driver asyncpg"), "follow the message"),
        (
            "sqlite:///shop.db",
            StorageUnavailableError("attempt to write a readonly database"),
            "check that this user may read",
        ),
        ("postgresql://h/d", StorageUnavailableError("refused"), "check that the server runs"),
    ],
)
def test_the_doctor_has_a_remedy_that_fits(url: str, error: Exception, remedy: str) -> None:
    assert _remedy(url, error).startswith(remedy)


@pytest.mark.parametrize("number", [b"1e400", b"-1E+999", b"1" + b"0" * 400 + b".0"])
def test_a_number_beyond_a_float_is_no_infinity(number: bytes) -> None:
    with pytest.raises(ValidationFailure, match="a number in it is larger than a float can be"):
        validate(None, b'{"amount": ' + number + b"}", Paid)


@pytest.mark.parametrize("data", [b'{"amount": 1e300}', b'{"amount": 1, "id": "1e400"}', b'{"amount": 1e-400}'])
def test_numbers_within_a_float_are_taken(data: bytes) -> None:
    assert isinstance(validate(None, data, Paid), Paid)


def test_a_form_that_a_model_rejects_is_told_with_its_content_type() -> None:
    form = CloudEvent(
        id="1", source="/shop", type="paid", data=b"amount=5", datacontenttype="application/x-www-form-urlencoded"
    )
    with pytest.raises(EventValidationError, match="its data came as application/x-www-form-urlencoded, not as JSON"):
        to_received_event(form, Paid)
    json = CloudEvent(id="1", source="/shop", type="paid", data=msgspec.Raw(b'{"amount": "x"}'))
    with pytest.raises(EventValidationError) as raised:
        to_received_event(json, Paid)
    assert "its data came as" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (17, "17"),
        ("17", '"17"'),
        ("-1.5e3", '"-1.5e3"'),
        ("true", '"true"'),
        ("null", '"null"'),
        (True, "true"),
        ("A-17", "A-17"),
        ("17a", "17a"),
    ],
)
def test_a_wait_shows_whether_it_is_for_text_or_for_a_number(value: Any, shown: str) -> None:
    assert Redaction().clean(describe("paid", {"order_id": value})) == f"paid where order_id = {shown}"
