"""Broken messages by the million: `python -m tests.cloudevents.fuzz --inputs 1000000 --seed 1`.

Every input gives an event or an EventError, at once; and what is an event stays the same event in every mode.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time

from edda.cloudevents import http_binding, json_format
from edda.cloudevents.event import CloudEvent
from edda.cloudevents.http_binding import ContentMode
from edda.errors import EventError

SECRET = "SECRET"
"""In values only, and in capitals, which no attribute's name has: no error may repeat it."""
SLOW = 0.005
SUSPICIOUS = 0.001
"""Seconds after which a message is timed again, for it may have been the machine."""
PROGRESS = 50_000

Headers = list[tuple[bytes, bytes]]
Message = tuple[Headers, bytes]

WORDS: list[bytes] = [
    *b'"data" "data_base64" "id" "source" "type" "time" "subject" "specversion" "datacontenttype" "dataschema"'.split(),
    *b'{ } [ ] : , " \\ \\" \\u0000 \\ud800 \\ud83d\\ude00 null true false NaN Infinity -Infinity -0 01 1. 1e5'.split(),
    *b'1e400 1e999999999 1e9999999999 -1.5e-7 2147483648 12345678901234567890123 {} [] {"a":1,"a":2}'.split(),
    *b"% %2 %zz %C0%A0 %FF %E2%82%AC %00 %22 %25 %2541 application/json text/plain; charset=utf-16 a/b+json".split(),
    *b"application/cloudevents application/cloudevents+json application/cloudevents-batch+json +avro 1.0".split(),
    *b"2018-04-05T17:31:00Z +25:00 2023-02-29T00:00:00Z 18:31Z urn:x // https://[::1]:80/a?b#c #a#b AAA= !!!".split(),
    *[
        b"\x00",
        b"\x7f",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\r\n",
        b"\t",
        b" ",
        "é€😀\ufdd0\U0001fffe".encode(),
    ],
    *[b"1" * 4301, b"0." + b"1" * 4300, b"[" * 70, b"[" * 70 + b"]" * 70, b'{"a":' * 80, b"[" * 3000, b"\\" * 300],
    *[b" " * 500, b";" * 500, b"; " * 300, b"%" * 300, b"a" * 1100, b":" * 500, b"/" * 500, b'"' * 300],
    SECRET.encode(),
]
VALUES: list[bytes] = [
    *b'null true false -0 1.10 1e400 1e99999999999999999999 2147483648 -2147483649 NaN {} [] {"a":1,"a":2}'.split(),
    *b'"" "x" "\\ud800" "\\ud83d\\ude00" "\\u0000" "\\u0085" "\\"" "1.0" "/a" "AA==" "AAAA=" "{}" "text/plain"'.split(),
    *b'"application/json" "2018-04-05T17:31:00Z" "2018-02-30T17:31:00Z" "urn:x" "a:b:c" "%" "SECRET"'.split(),
    *[b"1" * 4300, b"1" * 4301, b"[" * 63 + b"]" * 63, b"[" * 64 + b"]" * 64, b'"' + b"[" * 99 + b'"', b'"\xff"'],
]
TOKEN = re.compile(rb'"[^"\\]*"|[0-9][0-9.e]*|true|null')
NAMES = [b"ce-id", b"CE-ID", b"ce-source", b"ce-time", b"ce-data", b"ce-datacontenttype", b"ce-subject", b"ce-"]
NAMES += [b"ce-specversion", b"content-type", b"Content-Type", b"ce-x", b"ce-a_b", b"ce-\xff", b"x-other", b"", b"ce"]

_REQUIRED = {"ce-specversion": "1.0", "ce-id": "A-1", "ce-source": "/orders", "ce-type": "order.paid"}
_MORE = {
    "ce-time": "2018-04-05T17:31:00.123+05:30",
    "ce-subject": "Euro%20%E2%82%AC%20%F0%9F%98%80",
    "ce-dataschema": "https://example.com/s.json#/a",
    "ce-tenant": '"a \\"quoted\\" word"',
    "ce-count": "5",
}
_EVENT = b'{"specversion":"1.0","id":"A-1","source":"/orders","type":"order.paid"'
_FULL = _EVENT + (
    b',"time":"2018-04-05T17:31:00Z","subject":"x","dataschema":"urn:x","n":5,"b":true,"absent":null'
    b',"data":{"order":{"id":"A-17","lines":[{"sku":"S","price":1.10},{"sku":"T","price":2e3}]},"text":"\\u00e9\\n"}}'
)
_BODIES = [
    _EVENT + b"}",
    _FULL,
    _EVENT + b',"data":null}',
    _EVENT + b',"datacontenttype":"text/plain","data":"caf\xc3\xa9"}',
    _EVENT + b',"datacontenttype":"image/png","data_base64":"AP8="}',
    _EVENT + b',"datacontenttype":"a/b+json","data_base64":"' + b64encode(b'{"a":[1]}') + b'"}',
]


def _pairs(headers: dict[str, str]) -> Headers:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


SEEDS: list[Message] = [
    (_pairs(_REQUIRED), b""),
    (_pairs(_REQUIRED | _MORE | {"content-type": "application/json"}), b'{"a": [1, 2.50, {"b": null}], "c": "x"}'),
    (_pairs(_REQUIRED | {"content-type": "text/plain; charset=utf-8"}), b"caf\xc3\xa9"),
    (_pairs(_REQUIRED | {"content-type": 'multipart/form-data; boundary="a b"'}), b"\x00\xff"),
    *[([(b"content-type", b"application/cloudevents+json; charset=UTF-8")], body) for body in _BODIES],
    ([(b"content-type", b"application/cloudevents-batch+json")], b"[" + b",".join(_BODIES) + b"]"),
    ([(b"content-type", b"application/cloudevents-batch+json")], b"[]"),
]


class Mutator:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._header_moves: list[Callable[[Headers], None]] = [
            self._drop_header,
            self._repeat_header,
            self._add_header,
            self._change_value,
        ]

    def message(self) -> Message:
        seed_headers, seed_body = self._random.choice(SEEDS)
        if self._random.random() < 0.05:
            return self._soup(seed_headers)
        headers, body = list(seed_headers), seed_body
        # Mostly few, so that most of the message is still valid and the deep places are reached.
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 2, 3, 8))):
            if self._random.random() < (0.7 if len(headers) > 1 else 0.15):
                self._random.choice(self._header_moves)(headers)
            else:
                body = self._random.choice((self._change, self._replace_token))(body)
        return headers, body

    def _soup(self, headers: Headers) -> Message:
        rng = self._random
        body = rng.randbytes(rng.randrange(200))
        if rng.random() < 0.5:
            body = b"".join(rng.choices(WORDS, k=rng.randrange(30)))
        return (headers if rng.random() < 0.7 else [(rng.choice(NAMES), rng.randbytes(9)) for _ in range(5)]), body

    def _drop_header(self, headers: Headers) -> None:
        if headers:
            del headers[self._random.randrange(len(headers))]

    def _repeat_header(self, headers: Headers) -> None:
        if headers:
            headers.append(self._random.choice(headers))

    def _add_header(self, headers: Headers) -> None:
        headers.append((self._random.choice(NAMES), self._random.choice(WORDS)))

    def _change_value(self, headers: Headers) -> None:
        if headers:
            place = self._random.randrange(len(headers))
            name, value = headers[place]
            headers[place] = (name, self._change(value))

    def _replace_token(self, text: bytes) -> bytes:
        tokens = list(TOKEN.finditer(text))
        if not tokens:
            return text
        found = self._random.choice(tokens)
        return text[: found.start()] + self._random.choice(VALUES) + text[found.end() :]

    def _change(self, text: bytes) -> bytes:
        """Put something else in the place of a piece: a word, a byte, nothing, or another piece of it."""
        rng = self._random
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 0, 1, 2, 5, 20)))
        kind = rng.random()
        if kind < 0.5:
            new = rng.choice(WORDS)
        elif kind < 0.7:
            new = rng.randbytes(1)
        elif kind < 0.8:
            new = b""
        else:
            other = rng.randrange(len(text) + 1)
            new = text[other : other + rng.choice((1, 4, 16, 200))]
        return text[:start] + new + text[end:]


@dataclass
class Tally:
    inputs: int = 0
    events: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[tuple[str, Message]] = field(default_factory=list)
    slowest: float = 0.0
    slowest_message: Message = field(default_factory=lambda: ([], b""))

    def __str__(self) -> str:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.inputs} inputs: {self.events} events taken, {answers}; {len(self.failures)} failures; "
            f"slowest {self.slowest * 1000:.2f} ms"
        )


def run(inputs: int, seed: int, report: Callable[[str], None] = lambda line: None) -> Tally:
    mutator, tally = Mutator(seed), Tally()
    for number in range(1, inputs + 1):
        message = mutator.message()
        try:
            _judge(message, tally)
        except Exception as error:  # looking for these is what this is for
            tally.failures.append((repr(error), message))
        tally.inputs = number
        if number % PROGRESS == 0:
            report(str(tally))
    return tally


def _judge(message: Message, tally: Tally) -> None:
    events = _timed(message, tally)
    tally.events += len(events)
    for event in events:
        _check_event(event)
    for parse in (json_format.parse, json_format.parse_batch):
        try:
            parse(message[1])
        except EventError as error:
            _check_error(error)


def _timed(message: Message, tally: Tally) -> tuple[CloudEvent, ...]:
    start = thread_time()
    events = _parse(message, tally.statuses)
    took = thread_time() - start
    if took > SUSPICIOUS:
        took = min(took, *(_time(message) for _ in range(3)))
    if took > tally.slowest:
        tally.slowest, tally.slowest_message = took, message
    return events


def _time(message: Message) -> float:
    start = thread_time()
    _parse(message, Counter())
    return thread_time() - start


def _parse(message: Message, statuses: Counter[int]) -> tuple[CloudEvent, ...]:
    try:
        return http_binding.parse(*message).events
    except EventError as error:
        _check_error(error)
        statuses[error.status] += 1
        return ()


def _check_error(error: EventError) -> None:
    assert error.status in (400, 413, 415), error.status
    assert SECRET not in str(error), "the error repeats what was sent"
    assert len(str(error)) < 2_000, "the error is as long as what was sent"


def _check_event(event: CloudEvent) -> None:
    json_format.value_of(event)
    json_format.exact_value_of(event)
    stored = json_format.emit(event)
    assert json_format.parse_stored(stored) == event
    assert json_format.parse(stored) == event
    assert json_format.parse_batch(json_format.emit_batch([event, event])) == (event, event)
    try:
        travelled = _travel(event)
    except EventError as error:
        if "charset" not in str(error):
            raise AssertionError("an event that was taken cannot be sent on") from error
        return
    # The first time the kinds of extensions are lost, for a header is text; from then on nothing is.
    assert _travel(travelled) == travelled
    assert json_format.parse(json_format.emit(travelled)) == travelled


def _travel(event: CloudEvent) -> CloudEvent:
    headers, body = http_binding.emit(event, ContentMode.BINARY)
    return http_binding.parse(_pairs(dict(headers)), body).events[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tally = run(options.inputs, options.seed, lambda line: print(line, file=sys.stderr, flush=True))
    for reason, message in tally.failures[:10]:
        print(reason, message, sep="\n  ")
    if tally.slowest > SLOW:
        print("slow:", tally.slowest_message)
    print(f"seed {options.seed}: {tally}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
