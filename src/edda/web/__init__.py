"""The HTTP side of an app: an ASGI application that stores events before it answers."""

from edda.web.options import WebOptions
from edda.web.service import Service, State
from edda.web.tokens import Token, TokenScope, find_tokens, read_tokens
from edda.web.webhooks import GitHub, StandardWebhooks, Stripe, Webhook

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
