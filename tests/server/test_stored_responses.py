"""Responses that later requests go on from: stored, shown, deleted with all their words."""

import asyncio
from dataclasses import replace

import pytest
from ruvmlx.apps.server import stored_responses

from ruvmlx.errors import StoreBusy
from ruvmlx.store import responses as stored
from ruvmlx.store.replies import Replies
from tests.store.test_privacy import SECRET, forms

openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")
KEYS = ["a" * 20, "b" * 20]
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def post(running, text, key="", **fields):
    asked = {"model": running.model, "input": text, "max_output_tokens": 6, "temperature": 0, **fields}
    return running.ask("POST", "/v1/responses", asked, **bearer(key))


def bearer(key):
    return {"authorization": f"Bearer {key}"} if key else {}


def path(answer):
    return f"/v1/responses/{answer.json['id']}"


def text(answer):
    assert answer.status == 200, answer.json
    return answer.json["output"][0]["content"][0]["text"]


def follow_up(answer):
    return {"previous_response_id": answer.json["id"]}


def in_runtime(running, work):
    return asyncio.run_coroutine_threadsafe(running.serving.host.call_between(work), running.loop).result(20)


def test_a_response_goes_on_from_another(serve):
    """The model reads what it would read if the client had sent everything; also after a restart."""
    running = serve()
    first = post(running, "hello")
    second = post(running, "and you?", **follow_up(first))
    whole = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text(first)},
        {"role": "user", "content": "and you?"},
    ]
    same = post(running, whole)
    assert text(second) == text(same)
    assert second.json["usage"]["input_tokens"] == same.json["usage"]["input_tokens"]
    assert second.json["previous_response_id"] == first.json["id"] and second.json["store"] is True
    again = serve()
    third = post(again, "now?", **follow_up(second))
    more = [*whole, {"role": "assistant", "content": text(second)}, {"role": "user", "content": "now?"}]
    assert text(third) == text(post(again, more))
    other = post(again, "and now?", **follow_up(first))  # a branch
    assert other.json["usage"]["input_tokens"] < third.json["usage"]["input_tokens"]


def test_with_openais_client(serve):
    """Stream, continue, retrieve, delete."""
    running = serve()
    asked = {"model": running.model, "max_output_tokens": 6}
    with openai.OpenAI(base_url=running.url, api_key="none-needed", max_retries=0, timeout=600) as client:
        with client.responses.stream(**asked, input="hello") as stream:
            first = list(stream)[-1].response
        second = client.responses.create(**asked, input="more", previous_response_id=first.id)
        assert client.responses.retrieve(first.id).output_text == first.output_text
        assert client.responses.retrieve(second.id).previous_response_id == first.id
        with pytest.raises(openai.BadRequestError, match="stream"):
            client.responses.retrieve(first.id, stream=True)
        extra = ["reasoning.encrypted_content", "message.input_image.image_url"]
        assert client.responses.retrieve(first.id, stream=False, include=extra).id == first.id
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            client.responses.create(**asked, input="more", previous_response_id=second.id)


def test_the_tokens_of_an_input(roomy):
    """As many as the response says, also behind another response, with tools and without a thought."""
    tool = {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    with openai.OpenAI(base_url=roomy.url, api_key="none-needed", max_retries=0, timeout=600) as client:
        asked = {"model": roomy.model, "instructions": "Be kind.", "input": "hello"}
        first = client.responses.create(**asked, max_output_tokens=6)
        more = {"previous_response_id": first.id, "tools": [tool], "reasoning": {"effort": "none"}}
        for fields in (asked, asked | more):
            counted = client.responses.input_tokens.count(**fields)
            done = client.responses.create(**fields, max_output_tokens=1)
            assert counted.input_tokens == done.usage.input_tokens
            assert counted.object == "response.input_tokens"
        with pytest.raises(openai.BadRequestError, match="conversation"):
            client.responses.input_tokens.count(**asked, conversation="x")


def test_calls_and_results_are_part_of_it(roomy, calls_first):
    """The result of a stored response's call needs no more than its call_id."""
    seen = calls_first("look", FUNCTION["parameters"])
    first = post(roomy, "hello", tools=[FUNCTION], max_output_tokens=300)
    [item] = first.json["output"]
    result = [{"type": "function_call_output", "call_id": item["call_id"], "output": "noon"}]
    second = post(roomy, result, tools=[FUNCTION], **follow_up(first))
    assert second.status == 200, second.json
    asked, called, returned = seen[-1].messages[-3:]  # the template has no place for tools: they are text
    assert asked.content == "hello" and "look" in called.content and "noon" in returned.content
    alone = post(roomy, result, tools=[FUNCTION])
    assert alone.status == 400 and alone.error["param"] == "input[0].call_id"


def name_of(item):
    return {"type": "item_reference", "id": item["id"]}


def test_an_item_by_its_name(serve):
    """The AI SDK of Vercel sends the name of a stored item in place of the item. The model reads the
    item, also after a restart and in a request that continues the response."""
    running = serve()
    first = post(running, "hello")
    [said] = first.json["output"]
    asked = [{"role": "user", "content": "hello"}, name_of(said), {"role": "user", "content": "and you?"}]
    second = post(running, asked)
    whole = [asked[0], {"role": "assistant", "content": text(first)}, asked[2]]
    assert text(second) == text(post(running, whole))
    assert second.json["usage"]["input_tokens"] == post(running, whole).json["usage"]["input_tokens"]
    listed = running.ask("GET", f"{path(second)}/input_items?order=asc").json["data"]
    assert [item["content"][0]["text"] for item in listed] == ["hello", text(first), "and you?"]
    again = serve()
    third = post(again, "now?", **follow_up(second))
    more = [*whole, {"role": "assistant", "content": text(second)}, {"role": "user", "content": "now?"}]
    assert text(third) == text(post(again, more))


def test_a_call_by_its_name(roomy, calls_first):
    seen = calls_first("look", FUNCTION["parameters"])
    first = post(roomy, "hello", tools=[FUNCTION], max_output_tokens=300)
    [item] = first.json["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "noon"}
    asked = [{"role": "user", "content": "hello"}, name_of(item), result]
    second = post(roomy, asked, tools=[FUNCTION])
    assert second.status == 200, second.json
    _, called, returned = seen[-1].messages[-3:]
    assert "look" in called.content and "noon" in returned.content


def test_a_name_of_no_item(serve, monkeypatch):
    """The item was not stored or has another key, the name has a wrong form, or the items are too large."""
    running = serve(keys=KEYS)
    kept, lost = post(running, "hello", KEYS[0]), post(running, "hello", KEYS[0], store=False)
    names = [name_of(lost.json["output"][0]), {"type": "item_reference", "id": "nonsense"}]
    names.append({"type": "item_reference", "id": f"msg_{kept.json['id']}_7"})
    for key, name in [*((KEYS[0], name) for name in names), (KEYS[1], name_of(kept.json["output"][0]))]:
        refused = post(running, [{"role": "user", "content": "hello"}, name], key)
        assert refused.status == 404 and refused.error["code"] == "item_not_found"
        assert refused.error["param"] == "input[1]"
    refused = post(running, [{"type": "item_reference"}], KEYS[0])
    assert refused.status == 400 and refused.error["param"] == "input[0].id"
    named = [name_of(kept.json["output"][0]), {"role": "user", "content": "more"}]
    assert post(running, named, KEYS[0]).status == 200
    monkeypatch.setattr(stored_responses, "MOST_NAMED", 0)
    assert post(running, named, KEYS[0]).status == 400
    monkeypatch.undo()
    limits = running.serving.limits
    monkeypatch.setattr(running.serving, "limits", replace(limits, body=1000))
    many = post(running, [*named[:1] * 9, *named[1:]], KEYS[0])
    assert many.status == 400 and many.error["code"] == "context_length_exceeded"


def test_the_items_that_a_response_was_written_for(serve):
    """With all that its request went on from; by pages, in both orders; each item has one id."""
    running = serve()
    first = post(running, "hello")
    more = [
        {"role": "user", "content": "and", "id": "mine"},
        {"role": "user", "content": "you?", "id": "mine"},
    ]
    second = post(running, more, **follow_up(first))
    with openai.OpenAI(base_url=running.url, api_key="none-needed", max_retries=0, timeout=600) as client:
        listed = client.responses.input_items.list
        assert [item.content[0].text for item in listed(first.json["id"])] == ["hello"]
        for size in (1, 3, 100):  # the client asks for the next page itself
            found = list(listed(second.json["id"], order="asc", limit=size))
            assert [item.content[0].text for item in found] == ["hello", text(first), "and", "you?"]
            assert [item.role for item in found] == ["user", "assistant", "user", "user"]
            assert len({item.id for item in found}) == 4 and found[2].id == "mine"
            assert [item.id for item in listed(second.json["id"], limit=size)] == [
                item.id for item in found[::-1]
            ]
        # the client sends its list as include[], once for each item
        included = ["message.input_image.image_url", "reasoning.encrypted_content"]
        assert list(listed(second.json["id"], order="asc", include=included)) == found
    place = f"{path(second)}/input_items"
    page = running.ask("GET", f"{place}?limit=2&order=asc").json
    assert page["has_more"] and [page["first_id"], page["last_id"]] == [item.id for item in found[:2]]
    empty = running.ask("GET", f"{place}?after={found[0].id}").json
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    running.ask("DELETE", path(first))
    assert running.ask("GET", place).error["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=some", 400, "limit"),
        ("order=best", 400, "order"),
        ("before=x", 400, "before"),
        ("after=nothing", 404, "after"),
        ("include[]=x&before=x", 400, "before"),
        ("limit=3&limit=4", 400, None),
    ],
)
def test_a_wrong_query_is_refused(shared, query, status, param):
    refused = shared.ask("GET", f"{path(post(shared, 'hello'))}/input_items?{query}")
    assert refused.status == status and refused.error["param"] == param


def test_what_is_not_stored(shared):
    """`store: false`, and an id of nobody."""
    first = post(shared, "hello", store=False)
    assert first.json["store"] is False and shared.ask("GET", path(first)).status == 404
    for known in (first.json["id"], "", "nonsense"):
        refused = post(shared, "more", previous_response_id=known)
        assert refused.status == 404 and refused.error["code"] == "previous_response_not_found"
        assert refused.error["param"] == "previous_response_id"


def test_it_belongs_to_one_key(serve):
    """For another API key there is no such response."""
    running = serve(keys=KEYS)
    first = post(running, "hello", KEYS[0])
    assert post(running, "more", KEYS[1], **follow_up(first)).status == 404
    for method in ("GET", "DELETE"):
        assert running.ask(method, path(first), **bearer(KEYS[1])).status == 404
    assert running.ask("GET", f"{path(first)}/input_items", **bearer(KEYS[1])).status == 404
    assert running.ask("GET", path(first), **bearer(KEYS[0])).json == first.json
    assert post(running, "more", KEYS[0], **follow_up(first)).status == 200


def test_deletion_takes_the_words(serve, tiny, home):
    """Of the response, and of all prompts that went on from it; a rating stays. No file has them."""
    running = serve(kv_disk=10)
    first = post(running, f"{SECRET} is what I ask about")
    second = post(running, "more", **follow_up(first))
    third = post(running, "even more", **follow_up(second))
    rated = running.ask("POST", "/v1/ratings", {"id": first.json["id"], "rating": "up"})
    assert rated.json["applied"]
    assert running.ask("DELETE", path(first)).json == {
        "id": first.json["id"], "object": "response", "deleted": True,
    }  # fmt: skip
    assert running.ask("GET", path(first)).status == running.ask("DELETE", path(first)).status == 404
    assert running.ask("GET", path(second)).status == 200
    kept = in_runtime(
        running, lambda runtime: [runtime.store.replies.get(a.json["id"]) for a in (first, second, third)]
    )
    assert [row.prompt_ids for row in kept] == [[], [], []] and not kept[0].text and kept[1].text
    running.stop()
    assert_no_words(tiny, home)


def assert_no_words(tiny, home):
    words = forms(tiny)
    for file in filter(lambda found: found.is_file(), home.rglob("*")):
        assert not any(word in file.read_bytes() for word in words), file


def test_deletion_takes_the_words_of_other_versions(serve, tiny, home):
    """The deletion of a response also deletes its other versions. A version is a reply of best of n or a
    text of the user."""
    running = serve(best_of=3)
    asked = f"{SECRET} is what I ask about"
    first = post(running, asked, temperature=1.0)
    known = in_runtime(running, lambda runtime: runtime.store.replies.outside_chats())
    assert len(known) == 3
    post(running, "more", temperature=1.0, **follow_up(first))  # three prompts that have the words
    better = {"id": first.json["id"], "preferred": f"{SECRET}!"}
    assert running.ask("POST", "/v1/ratings", better).status == 200
    assert running.ask("DELETE", path(first)).status == 200
    left = in_runtime(running, lambda runtime: runtime.store.replies.outside_chats())
    assert len(left) == 3 and not {*left} & {*known}
    running.stop()
    assert_no_words(tiny, home)


def test_deletion_takes_the_words_of_continuations_that_are_not_stored(serve, tiny, home):
    """A later response has the words of the deleted response in its prompt. The client did not store the
    later response."""
    running = serve()
    first = post(running, f"{SECRET} is what I ask about")
    later = post(running, "more", store=False, **follow_up(first))
    assert running.ask("GET", path(later)).status == 404
    assert post(running, "and more", **follow_up(later)).status == 404
    assert running.ask("DELETE", path(first)).status == 200
    kept = in_runtime(running, lambda runtime: runtime.store.replies.get(later.json["id"]))
    assert kept.prompt_ids == [] and kept.text
    running.stop()
    assert_no_words(tiny, home)


@pytest.mark.parametrize("store", [True, False])
def test_deletion_takes_the_words_of_responses_that_name_an_item(serve, store):
    """Such a response can have `store: false`. The words of the responses that continue it go, too."""
    running = serve()
    first = post(running, "hello")
    [item] = first.json["output"]
    named = post(running, [name_of(item), {"role": "user", "content": "more"}], store=store)
    rows = [named]
    if store:
        rows.append(post(running, "and more", **follow_up(named)))
    assert [row.status for row in rows] == [200] * len(rows)
    assert running.ask("DELETE", path(first)).status == 200
    kept = in_runtime(running, lambda runtime: [runtime.store.replies.get(row.json["id"]) for row in rows])
    assert [row.prompt_ids for row in kept] == [[]] * len(rows)
    if store:
        assert post(running, "and?", **follow_up(named)).error["code"] == "item_not_found"


def test_the_newest_ones_stay(serve, monkeypatch):
    """The oldest go when there are too many, or too many bytes; a conversation has its own limit."""
    running = serve()
    monkeypatch.setattr(stored, "KEEP_RESPONSES", 2)
    first = post(running, "hello")
    second = post(running, "more", **follow_up(first))
    third = post(running, "and more", **follow_up(second))
    assert [running.ask("GET", path(each)).status for each in (first, second, third)] == [404, 200, 200]
    monkeypatch.setattr(stored, "KEEP_BYTES", 2 * len(third.body))
    fourth = post(running, "hello")
    assert [running.ask("GET", path(each)).status for each in (second, third)] == [404, 404]
    monkeypatch.undo()
    monkeypatch.setattr(stored, "MOST_LINKS", 1)
    fifth = post(running, "more", **follow_up(fourth))
    assert fifth.status == 200
    refused = post(running, "more", **follow_up(fifth))
    assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "without the reply"])
def test_an_answer_that_the_store_does_not_take_arrives(serve, monkeypatch, is_busy, stream):
    """It says that it is not stored: the store is busy, or the reply was deleted before its response came."""
    running = serve()

    def refuse(self, row):
        raise StoreBusy("locked")

    if is_busy:
        monkeypatch.setattr(stored.Responses, "add", refuse)
    else:
        monkeypatch.setattr(Replies, "add", lambda *_, **__: None)
    answer = post(running, "hello", stream=stream)
    assert answer.status == 200
    if stream:
        assert (
            b'"response.incomplete"' in answer.body and b'"store":false' in answer.body.split(b"event:")[-1]
        )
    else:
        assert text(answer) and answer.json["store"] is False
    monkeypatch.undo()
    assert post(running, "and you?").json["store"] is True
    running.stop()
    assert '"not_stored"' in running.log.getvalue()
