"""Names and addresses: which of them mean this machine."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/\s]+)(?::[0-9]{1,5})?")
_LONGEST = 255


@lru_cache(maxsize=1024)
def is_loopback_address(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or is_loopback_address(name)


def name_of(host: bytes) -> str | None:
    """The name in a Host header, without its port; None for what is no host."""
    if len(host) > _LONGEST:
        return None
    return _name_of(host)


@lru_cache(maxsize=1024)
def _name_of(host: bytes) -> str | None:
    found = _HOST.fullmatch(host.decode("latin-1"))
    return None if found is None else found[1].strip("[]").rstrip(".").lower()


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    """`*.shop.example` fits every name below it, `*` every name."""
    return any(
        pattern in {"*", name} or (pattern.startswith("*.") and name.endswith(pattern[1:]))
        for pattern in map(str.lower, patterns)
    )
