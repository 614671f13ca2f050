"""This module writes the server's log to stderr, as text or as JSON: one line for each answer of an endpoint,
and lines for errors, for idle work, and for opened and closed models. The lines have no text of users and no
secrets."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class RequestLog:
    """The log of the server. as_json: True if each line is a JSON object. sink: the stream for the lines, or
    None for no lines."""

    as_json: bool = False
    sink: TextIO | None = field(default_factory=lambda: sys.stderr)

    def write(self, event: str, facts: Mapping[str, object]) -> None:
        """Write a line to the log. event: "request", "error" or another word. facts: values by name, without
        text of a user. If the line cannot be written, for example because the disk is full, do nothing."""
        if self.sink is None:
            return
        now = time.time()
        if self.as_json:
            line = json.dumps({"time": round(now, 3), "event": event, **facts})
        else:
            clock = time.strftime("%H:%M:%S", time.localtime(now))
            line = " ".join([clock, event, *(f"{name}={value}" for name, value in facts.items())])
        with contextlib.suppress(OSError):
            print(line, file=self.sink, flush=True)
