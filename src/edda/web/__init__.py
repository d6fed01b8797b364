"""The HTTP side of an app: an ASGI application that stores events before it answers."""

from edda.web.options import WebOptions
from edda.web.security.tokens import Token, TokenScope, find_tokens, read_tokens
from edda.web.security.webhooks import GitHub, StandardWebhooks, Stripe, Webhook
from edda.web.service import Service, State

from .app import WebApp

__all__ = [
    "GitHub",
    "Service",
    "StandardWebhooks",
    "State",
    "Stripe",
    "Token",
    "TokenScope",
    "WebApp",
    "WebOptions",
    "Webhook",
    "find_tokens",
    "read_tokens",
]
