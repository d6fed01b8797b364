"""URLs are shown without their passwords, malformed ones too."""

from __future__ import annotations

import pytest

from edda.core.redact import redact_credentials, show_url, split_credentials

SECRET = "S3CRET"
URLS = [
    "postgresql://u:S3CRET@h:5432/db",
    '"postgresql://u:S3CRET@h/db"',
    "'mysql://u:S3CRET@h/db'",
    "nonsense://u:S3CRET@h/db",
    "u:S3CRET@h/db",
    "u:S3CRET",
    "postgresql:u:S3CRET@h",
    "//u:S3CRET@h/db",
    "nonsense://h/db?password=S3CRET",
    "postgresql://h/db?sslpassword=S3CRET&x=1",
    "postgresql://u:x#S3CRET@h/db",
    "postgresql://u:x/S3CRET@h/db",
    "postgresql://u:x?S3CRET@h/db",
    "postgresql://u:x@S3CRET@h/db",
    "postgresql//u:S3CRET@h",
    "sqlite://u:S3CRET@h/db",
    "u S3CRET@h",
    " postgresql://u:S3CRET@h/db",
    "host=h user=u password=S3CRET",
    "postgresql://u:S3CRET@h:port/db",
    "postgresql://u:S3CRET@[::1/db",
]
"""Each would show its password if it were printed as it is."""


@pytest.mark.parametrize("url", URLS)
def test_no_url_shows_its_password(url: str) -> None:
    assert SECRET not in show_url(url)


@pytest.mark.parametrize("url", ["sqlite:///edda.db", "edda.db", "postgresql://h:5432/db", "memory://", "http://x/y"])
def test_without_a_password_all_of_it_is_shown(url: str) -> None:
    assert show_url(url) == url


@pytest.mark.parametrize(
    "text",
    [
        "see https://u:S3CRET@h/x, please",
        '{"url":"https://u:S3CRET@h/","mail":"a@b"}',
        "https://u:a@S3CRET@h/",
        "https://h/?password=S3CRET&y=1",
        "https://h/x?a=1&access_token=S3CRET",
    ],
)
def test_urls_within_a_text_are_shown_without_them(text: str) -> None:
    assert SECRET not in redact_credentials(text)


@pytest.mark.parametrize(
    ("url", "plain", "header"),
    [
        ("https://h/x", "https://h/x", {}),
        ("https://u:p%40w@h:8/x?y", "https://h:8/x?y", {"Authorization": "Basic dTpwQHc="}),
        ("https://u@h/", "https://h/", {"Authorization": "Basic dTo="}),
    ],
)
def test_credentials_travel_in_a_header(url: str, plain: str, header: dict[str, str]) -> None:
    assert split_credentials(url) == (plain, header)
