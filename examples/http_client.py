"""Ask `ruvmlx serve` for a reply and rate it, with the standard library alone.

ruvmlx serve                                                # in another terminal
python examples/http_client.py "Name a river."
RUVMLX_URL=http://127.0.0.1:9000/v1 python examples/http_client.py "Name a river."
"""

import json
import os
import sys
import urllib.request
from typing import Any

URL = os.environ.get("RUVMLX_URL", "http://127.0.0.1:8642/v1")


def post(path: str, body: dict[str, Any]) -> Any:
    """Send a JSON body, and return the open response. Raises urllib.error.HTTPError if the server refuses."""
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers))


try:
    with urllib.request.urlopen(f"{URL}/models") as response:
        model = json.load(response)["data"][0]["id"]
except OSError as error:
    sys.exit(f"no answer from {URL}: {error}. Is `ruvmlx serve` running?")

question = {"role": "user", "content": " ".join(sys.argv[1:]) or "Name a river."}
reply_id = ""
with post("/chat/completions", {"model": model, "messages": [question], "stream": True}) as events:
    for line in events:
        name, _, data = line.decode().strip().partition(": ")
        if name == "data" and data != "[DONE]":
            event = json.loads(data)
            reply_id = event["id"]
            print(event["choices"][0]["delta"].get("content", ""), end="", flush=True)

with post("/ratings", {"id": reply_id, "rating": "up"}) as response:
    print("\n-- rated up:", json.load(response))
