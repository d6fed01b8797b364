"""The HTTP side of an app: an ASGI application that stores events before it answers."""

from edda.web.application import Web
from edda.web.options import WebOptions
from edda.web.service import Service, State
from edda.web.tokens import Token, TokenScope, find_tokens, read_tokens

__all__ = ["Service", "State", "Token", "TokenScope", "Web", "WebOptions", "find_tokens", "read_tokens"]
