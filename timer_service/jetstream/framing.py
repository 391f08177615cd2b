"""nats-py's client, made to read every subject that the broker lets through.

A subject is bytes to the broker: whatever holds no space, tab or line feed. nats-py 2.16 takes it for UTF-8 without
white space of any kind, and stops reading for good, or reconnects for ever, at a message where that is not so.
Anybody who may publish commands can store such a one, and it would be delivered again and again.
"""

from __future__ import annotations

import re
from typing import Any

import nats.protocol.parser as parser
from nats.aio.client import Client as NatsClient

# One space between the parts, as the broker writes them; all else up to the end of the line belongs to a part.
parser.MSG_RE = re.compile(rb"\AMSG ([^ \n]+) ([^ \n]+) (([^ \n]+) )?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG ([^ \n]+) ([^ \n]+) (([^ \n]+) )?(\d+) (\d+)\r\n")


class Client(NatsClient):
    """Subjects that are no UTF-8 come with U+FFFD in place of what can't be read: no subject of ours has that."""

    def _build_message(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> Any:
        return self.msg_class(
            subject=subject.decode("utf-8", "replace"),
            reply=reply.decode("utf-8", "replace"),
            data=data,
            headers=headers,
            _client=self,
            _sid=sid,
        )
