"""Webhook signatures, by the published examples of their senders."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as some

from edda.cloudevents.signatures import (
    TOLERANCE,
    SignatureClaim,
    SignatureError,
    plain_key,
    read_github,
    read_standard,
    read_stripe,
    sign,
    standard_key,
)

STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
STANDARD_BODY = b'{"test": 2432232314}'
STANDARD_TIME = 1614265330
STANDARD_HEADERS = [
    (b"webhook-id", b"msg_p5jXN8AQM9LWM0D4loKWxJek"),
    (b"webhook-timestamp", b"1614265330"),
    (b"webhook-signature", b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
]
GITHUB_SECRET = "It's a Secret to Everybody"
GITHUB_BODY = b"Hello, World!"
GITHUB_SIGNATURE = b"sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
STRIPE_SECRET = "whsec_test_secret"
STRIPE_TIME = 1492774577
STRIPE_BODY = b'{"id": "evt_1", "type": "invoice.paid"}'


def changed(headers: list[tuple[bytes, bytes]], name: bytes, value: bytes) -> list[tuple[bytes, bytes]]:
    return [(key, value if key == name else old) for key, old in headers]


def without(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [(key, value) for key, value in headers if key != name]


def encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers]


def stripe_signature(secret: str = STRIPE_SECRET, time: int = STRIPE_TIME, body: bytes = STRIPE_BODY) -> bytes:
    """By Stripe's documented formula: the time, a dot and the body, with the secret as it is written, in hex."""
    return hmac.new(secret.encode(), b"%d.%b" % (time, body), hashlib.sha256).hexdigest().encode()


def stripe_headers(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"stripe-signature", value)]


# Standard Webhooks


def test_the_example_of_standard_webhooks_fits() -> None:
    """Secret, id, time, body and signature are those of the specification's own libraries ("sign function works")."""
    read_standard(STANDARD_HEADERS, STANDARD_TIME).check([standard_key(STANDARD_SECRET)], STANDARD_BODY)


def test_the_example_of_standard_webhooks_is_what_we_sign() -> None:
    headers = sign(STANDARD_SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", STANDARD_TIME, STANDARD_BODY)
    assert encoded(headers) == STANDARD_HEADERS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"webhook-id", b"msg_other"),
        (b"webhook-timestamp", b"1614265331"),
        (b"webhook-signature", b"v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc="),
        (b"webhook-signature", b"v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE"),
    ],
)
def test_nothing_that_is_signed_can_be_changed(name: bytes, value: bytes) -> None:
    with pytest.raises(SignatureError):
        read_standard(changed(STANDARD_HEADERS, name, value), STANDARD_TIME).check(
            [standard_key(STANDARD_SECRET)], STANDARD_BODY
        )


def test_another_body_or_secret_does_not_fit() -> None:
    claim = read_standard(STANDARD_HEADERS, STANDARD_TIME)
    with pytest.raises(SignatureError, match="does not fit"):
        claim.check([standard_key(STANDARD_SECRET)], STANDARD_BODY + b" ")
    with pytest.raises(SignatureError, match="does not fit"):
        claim.check([b"another key"], STANDARD_BODY)
    with pytest.raises(SignatureError, match="does not fit"):
        claim.check([], STANDARD_BODY)


@pytest.mark.parametrize("name", [b"webhook-id", b"webhook-timestamp", b"webhook-signature"])
def test_a_header_that_is_missing_or_comes_twice_is_named(name: bytes) -> None:
    with pytest.raises(SignatureError, match=f"{name.decode()} is missing"):
        read_standard(without(STANDARD_HEADERS, name), STANDARD_TIME)
    with pytest.raises(SignatureError, match=f"{name.decode()} came more than once"):
        read_standard([*STANDARD_HEADERS, (name.upper(), b"1")], STANDARD_TIME)


@pytest.mark.parametrize(
    "value", [b"", b"v1", b"v1,", b"g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=", b"v1a,AAAA", b"v2,AAAA", b"v1,!"]
)
def test_a_header_without_a_signature_that_is_known_is_refused_before_the_body_is_needed(value: bytes) -> None:
    with pytest.raises(SignatureError, match="no signature"):
        read_standard(changed(STANDARD_HEADERS, b"webhook-signature", value), STANDARD_TIME)


def test_one_good_signature_among_several_is_enough() -> None:
    good = dict(STANDARD_HEADERS)[b"webhook-signature"]
    value = b"v1,Ceo5qEr07ixe2NLpvHk3FH9bwy/WavXrAFQ/9tdO6mc= v1a,AAAA junk " + good + b" v1,!"
    claim = read_standard(changed(STANDARD_HEADERS, b"webhook-signature", value), STANDARD_TIME)
    claim.check([standard_key(STANDARD_SECRET)], STANDARD_BODY)


def test_a_secret_is_changed_without_a_gap_on_either_side() -> None:
    old, new = STANDARD_SECRET, f"whsec_{b64encode(b'n' * 24).decode()}"
    both = [standard_key(old), standard_key(new)]
    for secret in (old, new):
        read_standard(encoded(sign(secret, "1", 0, b"")), 0).check(both, b"")
    for key in both:
        read_standard(encoded(sign([old, new], "1", 0, b"")), 0).check([key], b"")


@pytest.mark.parametrize(
    ("late", "taken"), [(0, True), (300, True), (-300, True), (301, False), (-301, False), (1e6, False)]
)
def test_a_signature_is_valid_for_five_minutes_before_and_after(late: float, taken: bool) -> None:
    assert TOLERANCE == 300
    stripe = stripe_headers(b"t=%d,v1=%b" % (STANDARD_TIME, stripe_signature()))
    for read, headers in ((read_standard, STANDARD_HEADERS), (read_stripe, stripe)):
        if taken:
            assert isinstance(read(headers, STANDARD_TIME + late), SignatureClaim)
        else:
            with pytest.raises(SignatureError, match="more than 300 seconds"):
                read(headers, STANDARD_TIME + late)


def test_the_window_can_be_another() -> None:
    read_standard(STANDARD_HEADERS, STANDARD_TIME + 500, tolerance=600)
    with pytest.raises(SignatureError, match="more than 10 seconds from now"):
        read_standard(STANDARD_HEADERS, STANDARD_TIME - 11, tolerance=10)


@pytest.mark.parametrize("value", [b"", b"now", b"-1614265330", b"1614265330.0", b"+1614265330", b"1" * 5000, b"1_0"])
def test_a_time_that_is_no_number_of_seconds_is_refused(value: bytes) -> None:
    with pytest.raises(SignatureError, match="whole seconds"):
        read_standard(changed(STANDARD_HEADERS, b"webhook-timestamp", value), STANDARD_TIME)


def test_an_id_with_a_dot_is_refused_for_it_could_be_cut_elsewhere() -> None:
    """`a.1.2.x` is id a, time 1, body 2.x, and with the same signature id a.1, time 2, body x."""
    signed = encoded(sign(STANDARD_SECRET, "a", 1, b"2.x"))
    shifted = changed(changed(signed, b"webhook-id", b"a.1"), b"webhook-timestamp", b"2")
    with pytest.raises(SignatureError, match="dots"):
        read_standard(shifted, 2).check([standard_key(STANDARD_SECRET)], b"x")


@given(some.text(min_size=1, max_size=50), some.binary(max_size=50), some.integers(0, 2**33))
def test_every_signature_of_ours_fits_into_headers_and_verifies(id: str, body: bytes, time: int) -> None:
    try:
        id.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is in no event's id
    headers = sign(STANDARD_SECRET, id, time, body)
    assert all(value.isascii() and value.isprintable() for _, value in headers)
    read_standard(encoded(headers), time).check([standard_key(STANDARD_SECRET)], body)


def test_two_ids_are_never_signed_as_one() -> None:
    ids = ("a.b", "a%2Eb", "a%252Eb", "a b", "a+b", "a%20b")
    assert len({dict(sign(STANDARD_SECRET, id, 0, b""))["webhook-id"] for id in ids}) == len(ids)


@pytest.mark.parametrize("secret", ["", "whsec_", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_no base64", "whsec_ä"])
def test_a_secret_in_another_format_than_standard_webhooks_is_an_error(secret: str) -> None:
    with pytest.raises(ValueError, match="whsec_") as refused:
        standard_key(secret)
    assert not secret or secret == "whsec_" or secret not in str(refused.value)


def test_the_padding_of_a_secret_may_be_left_out() -> None:
    assert standard_key("whsec_YWI") == standard_key("whsec_YWI=") == b"ab"


# GitHub


def test_the_example_of_github_fits() -> None:
    """From "Validating webhook deliveries" in GitHub's documentation."""
    read_github([(b"X-Hub-Signature-256", GITHUB_SIGNATURE)]).check([plain_key(GITHUB_SECRET)], GITHUB_BODY)


def test_a_body_that_github_did_not_sign_does_not_fit() -> None:
    claim = read_github([(b"x-hub-signature-256", GITHUB_SIGNATURE)])
    for key, body in ((GITHUB_SECRET, b"Hello, World?"), (GITHUB_SECRET.lower(), GITHUB_BODY)):
        with pytest.raises(SignatureError, match="does not fit"):
            claim.check([plain_key(key)], body)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"sha256=",
        GITHUB_SIGNATURE[7:],
        GITHUB_SIGNATURE[:-1],
        GITHUB_SIGNATURE.replace(b"sha256", b"sha1"),
        GITHUB_SIGNATURE.replace(b"=7571", b"= 571"),
        GITHUB_SIGNATURE + b"00",
        b"sha256=" + b"\xff" * 64,
    ],
)
def test_what_is_no_signature_of_github_is_refused_at_once(value: bytes) -> None:
    with pytest.raises(SignatureError, match="no signature"):
        read_github([(b"x-hub-signature-256", value)])


def test_the_old_signature_of_github_is_not_accepted() -> None:
    """With SHA-1, in a header of its own."""
    old = hmac.new(GITHUB_SECRET.encode(), GITHUB_BODY, hashlib.sha1).hexdigest().encode()
    with pytest.raises(SignatureError, match="x-hub-signature-256 is missing"):
        read_github([(b"x-hub-signature", b"sha1=" + old)])


# Stripe


def test_what_stripe_signs_fits() -> None:
    """By Stripe's published formula: an example together with the secret that made it was not to be found."""
    headers = stripe_headers(b"t=%d,v1=%b,v0=%b" % (STRIPE_TIME, stripe_signature(), b"6f" * 32))
    read_stripe(headers, STRIPE_TIME).check([plain_key(STRIPE_SECRET)], STRIPE_BODY)


def test_stripe_may_sign_with_an_old_and_a_new_secret() -> None:
    value = b"t=%d, v1=%b, v1=%b" % (STRIPE_TIME, stripe_signature("old"), stripe_signature("new"))
    for secret in ("old", "new"):
        read_stripe(stripe_headers(value), STRIPE_TIME).check([plain_key(secret)], STRIPE_BODY)


@pytest.mark.parametrize(("time", "body"), [(STRIPE_TIME + 1, STRIPE_BODY), (STRIPE_TIME, STRIPE_BODY + b"\n")])
def test_neither_the_time_nor_the_body_of_stripe_can_be_changed(time: int, body: bytes) -> None:
    claim = read_stripe(stripe_headers(b"t=%d,v1=%b" % (time, stripe_signature())), STRIPE_TIME)
    with pytest.raises(SignatureError, match="does not fit"):
        claim.check([plain_key(STRIPE_SECRET)], body)


@pytest.mark.parametrize("form", ["v1={}", "t={},t={},v1={}", "t=,v1={}", "t={}", "t={},v0={}", "t={},v1=", ""])
def test_a_signature_of_stripe_has_one_time_and_a_v1(form: str) -> None:
    value = form.replace("t={}", f"t={STRIPE_TIME}").replace("{}", stripe_signature().decode())
    with pytest.raises(SignatureError):
        read_stripe(stripe_headers(value.encode()), STRIPE_TIME)
