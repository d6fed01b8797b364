"""`from edda.channels import ...`: the public names for channels."""

from edda.errors import ChannelError, MessageTimeoutError
from edda.workflow.channels import ChannelMessage, publish, receive, send_to, subscribe, unsubscribe

__all__ = [
    "ChannelError",
    "ChannelMessage",
    "MessageTimeoutError",
    "publish",
    "receive",
    "send_to",
    "subscribe",
    "unsubscribe",
]
