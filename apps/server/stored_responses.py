"""This module stores responses, so that later requests can continue them.

The module answers GET and DELETE /v1/responses/ID, and GET /v1/responses/ID/input_items. The responses are in
the same store as the chats. DELETE removes the text of a response from the files of the store and from the KV
caches; if another process reads the store, the store's log holds the text until that process ends.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ruvmlx.chats import soft_delete
from ruvmlx.errors import NotFound, StoreError, UsageError
from ruvmlx.kv.owners import REQUESTS
from ruvmlx.runtime import Runtime
from ruvmlx.store import ResponseRow

from . import responses_answers as answers
from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .responses_bodies import InputItem, InputText, OutputText, ResponsesBody, check_item, items_of

SHOW_LINK = {"operationId": "show_response", "parameters": {"id": "$response.body#/id"}}
DELETE_LINK = {**SHOW_LINK, "operationId": "delete_response"}
ITEMS_LINK = {**SHOW_LINK, "operationId": "list_input_items"}
_ITEM_ID = re.compile(r"(msg|rs|fc)_(?P<response>\w+)_\d+")  # responses_items.py makes these ids
MOST_NAMED = 1_000  # the maximum number of responses whose items one conversation can name


class ResponseDeleted(Struct):
    """The answer after a response and its text were deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ListedItem(InputItem, omit_defaults=True, kw_only=True):
    """One item of the input to a response. If the item is a message, its content is a list of text parts."""

    id: str
    type: Literal["message", "reasoning", "function_call", "function_call_output"]


class InputItemList(Struct, kw_only=True):
    """A page of input items. first_id, last_id: the ids of the page's first and last item; null if the page
    is empty. has_more: true if a request with `after` = last_id returns more items."""

    object: Literal["list"] = "list"
    data: Sequence[ListedItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PageQuery(Struct, forbid_unknown_fields=True):
    """The query of a request for input items: which items the page has, and their order."""

    order: Annotated[Literal["asc", "desc"], Meta(description="asc: the oldest item first.")] = "desc"
    limit: Annotated[int, Meta(ge=1, le=100, description="Items of a page.")] = 20
    after: Annotated[str, Meta(description="The last item's id of the page before.")] = ""


class ShowQuery(Struct):
    """The query of a request for a stored response. stream: only false, because a stored response is
    complete. A field that this struct does not have changes nothing."""

    stream: Annotated[bool, Meta(description="Only false.", extra_json_schema={"enum": [False]})] = False


class _StoredOutput(Struct):
    """The part of a stored response that a later request needs: the output items, each as JSON."""

    output: list[msgspec.Raw]


async def keep_response(call: Call, body: ResponsesBody, answer: answers.ResponseAnswer) -> None:
    """Store the input of the request and the response to it, unless the request has `store: false`. With
    `store: false`, store only the ids of the response that the request continues and of the responses that
    its input names: if one of these responses is deleted, the store must also delete this prompt. If the
    response cannot be stored, the client still gets the answer, with `store: false`, and the log gets the
    reason."""
    items = items_of(body)
    named = tuple(_named_responses(items))
    if not answer.store and body.previous_response_id is None and not named:
        return
    asked, said = (msgspec.json.encode(items), msgspec.json.encode(answer)) if answer.store else (b"", b"")
    row = ResponseRow(answer.id, body.previous_response_id, call.salt, asked, said, named)
    try:
        stored = await call.serving.host.call_between(lambda runtime: runtime.store.responses.add(row))
        reason = "" if stored else "the store does not have its reply"
    except StoreError as error:
        reason = type(error).__name__
    if reason:
        answer.store = False
        call.serving.log.write("not_stored", {"id": answer.id, "reason": reason})


async def stored_items(call: Call, response_id: str | None) -> list[InputItem]:
    """Return the items of a response and of all earlier responses that it continues. Raise ApiError, 404, if
    one of these responses is not in the store, and 400 if the responses are too large together."""
    if response_id is None:
        return []
    field, most = "previous_response_id", call.serving.limits.body

    def read(runtime: Runtime) -> list[ResponseRow]:
        return runtime.store.responses.conversation(response_id, call.salt, most)

    try:
        rows = await call.serving.host.call_between(read)
    except NotFound as error:
        raise ApiError(404, f"{field}: {error}", field, "previous_response_not_found") from None
    except UsageError as error:
        raise ApiError(400, f"{field}: {error}", field, "context_length_exceeded") from None
    found: list[InputItem] = []
    for row in rows:
        found += msgspec.json.decode(row.input, type=list[InputItem])
        found += [msgspec.json.decode(item, type=InputItem) for item in _output(row)]
    return await named_items(call, found, lambda at: field)


def _output(row: ResponseRow) -> list[msgspec.Raw]:
    return msgspec.json.decode(row.answer, type=_StoredOutput).output


def _named_responses(items: Iterable[InputItem]) -> dict[str, None]:
    """Return the ids of the responses that have the named output items, each id once."""
    ids = [_ITEM_ID.fullmatch(item.id or "") for item in items if item.kind == "item_reference"]
    return dict.fromkeys(found["response"] for found in ids if found)


async def named_items(call: Call, items: Sequence[InputItem], place: Callable[[int], str]) -> list[InputItem]:
    """Return the items, with the stored output item in place of each item that only names a stored item.
    place: a function that returns the field of the request with item number i, for error messages. Raise
    ApiError, 404, if the store does not have a named item. Raise ApiError, 400, if the named items are too
    large together or belong to more than MOST_NAMED responses."""
    ids = list(_named_responses(items))
    if len(ids) > MOST_NAMED:
        raise ApiError(400, f"input: it names items of more than {MOST_NAMED} responses.", "input")

    def read(runtime: Runtime) -> list[ResponseRow]:
        return runtime.store.responses.those(ids, call.salt)

    rows = await call.serving.host.call_between(read) if ids else []
    known = {msgspec.json.decode(raw, type=InputItem).id: raw for row in rows for raw in _output(row)}
    left, found = call.serving.limits.body, list[InputItem]()
    for at, item in enumerate(items):
        if item.kind == "item_reference":
            check_item(item, place(at))
            if item.id not in known:
                field = place(at)
                message = f"{field}: the item that it names was not stored, or it was deleted."
                raise ApiError(404, message, field, "item_not_found")
            left -= len(known[item.id])
            if left < 0:
                message = f"{place(at)}: the named items have more than {call.serving.limits.body} bytes."
                raise ApiError(400, message, place(at), "context_length_exceeded")
            item = msgspec.json.decode(known[item.id], type=InputItem)
        found.append(item)
    return found


async def show_response(call: Call) -> Answer:
    """Return a stored response in the form in which the client of the first request got the response."""
    if call.query.stream:
        message = "stream: a stored response is complete, so there is no stream of it; leave the field out."
        raise ApiError(400, message, "stream", "unsupported_parameter")
    return msgspec.Raw((await _stored_row(call)).answer)


async def _stored_row(call: Call) -> ResponseRow:
    """Return the response's row in the store. Raise ApiError, 404, if the store has no response with this id,
    or if the response belongs to another API key."""
    id = call.names["id"]
    try:
        async with call.models.using_any() as serving:
            return await serving.host.call_between(lambda runtime: runtime.store.responses.get(id, call.salt))
    except NotFound as error:
        raise ApiError(404, f"id: {error}", "id", "not_found") from None


async def list_input_items(call: Call) -> Answer:
    """Return a page of the items that the model read for a response: the input of the request, and the items
    of all earlier responses that the request continued."""
    row, query = await _stored_row(call), call.query
    async with call.models.using_any() as serving:
        there = replace(call, serving=serving)
        before = await stored_items(there, row.previous)
        own = await named_items(there, msgspec.json.decode(row.input, type=list[InputItem]), lambda at: "id")
    items = _items_with_ids(row.id, [*before, *own])
    if query.order == "desc":
        items.reverse()
    if query.after:
        ids = [item.id for item in items]
        if query.after not in ids:
            raise ApiError(404, "after: the response has no such item.", "after", "not_found")
        items = items[ids.index(query.after) + 1 :]
    page = items[: query.limit]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return InputItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > len(page))


def _items_with_ids(response_id: str, items: Sequence[InputItem]) -> list[ListedItem]:
    """Give each item an id. If an item has an id and no earlier item has the same id, the item keeps its
    id."""
    found, ids = list[ListedItem](), set[str]()
    for at, item in enumerate(items):
        fields = msgspec.structs.asdict(item)
        id = item.id if item.id and item.id not in ids else f"item_{response_id}_{at}"
        ids.add(id)
        if isinstance(item.content, str):
            is_reply = item.role == "assistant"
            fields["content"] = [OutputText(item.content, [], []) if is_reply else InputText(item.content)]
        found.append(
            ListedItem(**fields | {"id": id, "type": item.kind, "status": item.status or "completed"})
        )
    return found


async def delete_response(call: Call) -> Answer:
    """Delete a response and its text. If later responses continue this response, no request can continue the
    later responses any more."""
    row = await _stored_row(call)
    for model in call.models.open_models:
        await call.models.look(model, lambda runtime: runtime.engine.sessions.drop(REQUESTS))
    async with call.models.using_any() as serving:
        await serving.host.call_between(lambda runtime: soft_delete.forget(runtime.store, [row.id]))
    for model in call.models.open_models:
        await call.models.look(model, lambda runtime: runtime.forget_words())
    return ResponseDeleted(row.id)


ENDPOINTS = [
    Endpoint(
        "GET", "/v1/responses/{id}", show_response, "Show a stored response.", answers.ResponseAnswer,
        query=ShowQuery, links=[DELETE_LINK, ITEMS_LINK], statuses=(404,),
    ),
    Endpoint(
        "GET", "/v1/responses/{id}/input_items", list_input_items, "List what a response was written for.",
        InputItemList, query=PageQuery, statuses=(404,),
    ),
    Endpoint(
        "DELETE", "/v1/responses/{id}", delete_response, "Delete a stored response and its words.",
        ResponseDeleted, statuses=(404,),
    ),
]  # fmt: skip
