"""Events in headers and body: rows C6 to C12."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from msgspec import Raw

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import make
from edda.errors import EventError

from .messages import ATTRIBUTES, binary, parse, refused, structured


def emitted(**changes: Any) -> dict[str, str]:
    headers, _ = http_binding.emit(make("order.paid", "/orders", "A-1", b"x", **changes))
    return dict(headers)


def test_the_content_type_is_the_datacontenttype() -> None:
    """C6."""
    assert parse(binary(b"<a/>", "text/xml; charset=utf-8")).datacontenttype == "text/xml; charset=utf-8"
    assert emitted(datacontenttype="image/png")["content-type"] == "image/png"
    assert "ce-datacontenttype" not in emitted(datacontenttype="image/png")


def test_a_header_for_the_datacontenttype_is_refused() -> None:
    """C6: even if it says the same as the Content-Type."""
    error = refused(*binary(b"1", "application/json", datacontenttype="application/json"))
    assert (error.status, error.attribute) == (400, "datacontenttype")


def test_two_content_types_are_refused() -> None:
    """C8."""
    headers, body = binary(b"1", "application/json")
    assert refused([*headers, (b"Content-Type", b"text/plain")], body).status == 400


def test_the_body_is_the_data_as_it_is() -> None:
    """C7."""
    assert parse(binary(b"\x00\xff\r\n", "application/octet-stream")).data == b"\x00\xff\r\n"
    assert http_binding.emit(make("t", "/s", "1", b"\x00\xff\r\n"))[1] == b"\x00\xff\r\n"


def test_an_empty_body_is_no_data() -> None:
    """C7: also where the type says JSON, in which nothing is not a value."""
    for content_type in ("application/json", "text/plain", None):
        assert parse(binary(b"", content_type)).data is None
    assert http_binding.emit(make("t", "/s", "1"))[1] == b""


def test_json_without_a_content_type_is_json() -> None:
    """C7: as the Python SDKs send it by default. Its type is made explicit, as in C27."""
    event = parse(binary(b' {"looks": "like JSON"}\n'))
    assert (event.datacontenttype, event.data) == ("application/json", Raw(b'{"looks": "like JSON"}'))
    assert dict(http_binding.emit(event)[0])["content-type"] == "application/json"


@pytest.mark.parametrize("body", [b"\x00\xff", b"plain text", b"{", b"NaN", b" ", "café".encode("latin-1"), b"<a/>"])
def test_what_is_not_json_and_has_no_content_type_stays_bytes(body: bytes) -> None:
    """C7."""
    event = parse(binary(body))
    assert (event.datacontenttype, event.data) == (None, body)
    assert "content-type" not in dict(http_binding.emit(event)[0])
    assert http_binding.emit(event)[1] == body


@pytest.mark.parametrize(
    "body", [b'{"a": 1, "a": 2}', b"[" * 65 + b"]" * 65, b"1" * 5000, b"[" * 100_000 + b"]" * 100_000]
)
def test_json_that_is_refused_with_its_content_type_is_refused_without_it(body: bytes) -> None:
    """C7, C28: as bytes it would be stored and match no wait."""
    for content_type in ("application/json", None):
        error = refused(*binary(body, content_type))
        assert (error.status, error.attribute) == (400, "data")


@pytest.mark.parametrize("data", [b"1", b'{"a": 1}', b'{"a": 1, "a": 2}'])
def test_bytes_without_a_type_that_happen_to_be_json_travel_structured(data: bytes) -> None:
    """C7, C23, emitting: in binary mode they would arrive as JSON."""
    encoded = b64encode(data).decode()
    event = json_format.parse(structured(data_base64=encoded))
    headers, body = http_binding.emit(event)
    assert parse(([(name.encode(), value.encode()) for name, value in headers], body)) == event
    assert event.data == data


def test_ascii_is_text_in_both_modes() -> None:
    """C7, C26: what is US-ASCII is UTF-8 as well."""
    kind = "text/plain; charset=US-ASCII"
    assert parse(binary(b"plain", kind)).data == "plain"
    assert json_format.parse(structured(data="plain", datacontenttype=kind)).data == "plain"
    assert json_format.parse(structured(data_base64="cGxhaW4=", datacontenttype=kind)).data == "plain"
    assert http_binding.emit(make("t", "/s", "1", "plain", datacontenttype=kind))[1] == b"plain"
    assert parse(binary("café".encode(), kind)).data == "café".encode()
    with pytest.raises(EventError, match="charset"):
        make("t", "/s", "1", "café", datacontenttype=kind)


def test_json_in_the_body_is_kept_as_its_text() -> None:
    """C7."""
    text = b'{"amount": 1.10, "big": 12345678901234567890}'
    assert parse(binary(text, "application/json")).data == Raw(text)
    assert http_binding.emit(parse(binary(b" \n" + text + b"\r\n", "application/json")))[1] == text


@pytest.mark.parametrize("body", [b"{", b"nonsense", b" ", b'{"a": 1, "a": 2}', b"NaN", b"\xff"])
def test_a_body_that_is_not_the_json_it_says_is_refused(body: bytes) -> None:
    """C7, C28."""
    error = refused(*binary(body, "application/vnd.orders+json"))
    assert (error.status, error.attribute) == (400, "data")


def test_text_is_a_string_if_it_is_utf8_and_bytes_if_not() -> None:
    """C7: either way the same bytes go out again."""
    for body, data in ((b"caf\xc3\xa9", "café"), (b"caf\xe9", b"caf\xe9")):
        event = parse(binary(body, "text/plain"))
        assert event.data == data
        assert http_binding.emit(event)[1] == body
    assert parse(binary(b"caf\xe9", "text/plain; charset=iso-8859-1")).data == b"caf\xe9"


def test_text_in_another_charset_is_not_sent_as_if_it_were_utf8() -> None:
    """C7, emitting."""
    with pytest.raises(EventError, match="charset"):
        make("t", "/s", "1", "café", datacontenttype="text/plain; charset=iso-8859-1")


def test_names_of_headers_are_read_in_any_case() -> None:
    """C8."""
    headers = [(b"Ce-" + name.upper().encode(), value.encode()) for name, value in ATTRIBUTES.items()]
    event = parse(([*headers, (b"CE-Tenant", b"Blue")], b""))
    assert (event.id, event.extensions) == ("A-1", {"tenant": "Blue"})


@pytest.mark.parametrize("name", ["id", "subject", "tenant"])
def test_an_attribute_that_comes_twice_is_refused(name: str) -> None:
    """C8: even with the same value."""
    headers, body = binary(**{name: "x"})
    error = refused([*headers, (b"CE-" + name.encode(), b"x")], body)
    assert (error.status, error.attribute) == (400, name)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ('"plain"', "plain"),
        ('"with space"', "with space"),
        (r'"a \"quoted\" word and a \\"', 'a "quoted" word and a \\'),
        ('"100%25"', "100%"),
        (r'"%5C\a"', "\\a"),
        ("%22quoted%22", '"quoted"'),
        ("%2541", "%41"),
        ('say "hi"', 'say "hi"'),
        (r"a\b", r"a\b"),
        (" around\t", "around"),
        ("Euro%20%E2%82%AC%20%F0%9F%98%80", "Euro € 😀"),
        ("Euro € 😀", "Euro € 😀"),
    ],
)
def test_a_value_is_unquoted_once_and_then_percent_decoded_once(sent: str, meant: str) -> None:
    """C9."""
    assert parse(binary(subject=sent)).subject == meant


@pytest.mark.parametrize("sent", ['"open', '"', '"a"b', '"a" "b"', '"escaped\\"', "%", "%4", "100%", "%zz", "a%2"])
def test_broken_quotes_and_percents_are_refused(sent: str) -> None:
    """C9."""
    error = refused(*binary(subject=sent))
    assert (error.status, error.attribute) == (400, "subject")


def test_lower_case_and_needless_encoding_is_taken() -> None:
    """C10."""
    assert parse(binary(subject="%e2%82%ac%41%62%7e")).subject == "€Ab~"
    assert parse(binary(source="%2forders")).source == "/orders"


@pytest.mark.parametrize("sent", ["%C0%A0", "%FF", "%ED%A0%80", "%E2%82", "%F5%80%80%80"])
def test_what_is_not_utf8_is_refused(sent: str) -> None:
    """C11."""
    error = refused(*binary(subject=sent))
    assert (error.status, error.attribute) == (400, "subject")


def test_raw_bytes_that_are_not_utf8_are_refused() -> None:
    """C11."""
    headers, body = binary()
    assert refused([*headers, (b"ce-subject", b"caf\xe9")], body).attribute == "subject"


def test_a_value_is_encoded_as_the_specification_shows() -> None:
    """C12."""
    assert http_binding.encode_value("Euro € 😀") == "Euro%20%E2%82%AC%20%F0%9F%98%80"
    assert http_binding.encode_value('"100%"') == "%22100%25%22"
    assert emitted(subject="Euro € 😀")["ce-subject"] == "Euro%20%E2%82%AC%20%F0%9F%98%80"


def test_of_ascii_only_space_quote_and_percent_are_encoded() -> None:
    """C12."""
    printable = "".join(map(chr, range(0x20, 0x7F)))
    changed = {char for char in printable if http_binding.encode_value(char) != char}
    assert changed == {" ", '"', "%"}


def test_every_character_is_encoded_so_that_it_comes_back() -> None:
    """C12."""
    for code in (*range(0x300), 0xFFFD, 0x10000, 0x10FFFD):
        encoded = http_binding.encode_value(chr(code))
        assert encoded.isascii()
        assert encoded.isprintable()
        assert http_binding.decode_value("subject", encoded.encode()) == chr(code)
