"""Do the tables say what the witness log says? The chain proves the log; this compares the rest with it."""

from .adapters import Adapters
from .witness import digest


def disagreement(store: Adapters) -> str:
    """The first adapter version or rating that the log does not know as it is; "" if all agree.

    A row that is gone is no disagreement: adapters and old weights may be deleted.
    """
    return _versions(store) or _ratings(store)


def _versions(store: Adapters) -> str:
    known = {_key(row.body): row.body["state"] for row in store.witnessed("version")}
    sql = "SELECT fingerprint, name, version, state FROM adapters"
    for fingerprint, name, version, state in store._rows(sql):
        logged = known.get((fingerprint, name, version))
        if logged is None:
            return f"version {version} of adapter {name!r} is not in the log"
        if state is not None and digest(state) != logged:
            return f"version {version} of adapter {name!r} is not what was written"
    return ""


def _ratings(store: Adapters) -> str:
    logged = [row.body for row in store.witnessed("rating")]
    known = {b["id"]: (*_key(b), b["reply"], b["rating"], b["weight"]) for b in logged}
    sql = "SELECT id, fingerprint, adapter, version, reply_id, rating, weight FROM ratings"
    for rating_id, *facts in store._rows(sql):
        if known.get(rating_id) != tuple(facts):
            return f"rating {rating_id} is not what was written"
    return ""


def _key(body: dict) -> tuple[str, str, int]:
    return body["model"], body["adapter"], body["version"]
