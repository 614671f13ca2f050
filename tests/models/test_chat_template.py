"""Chats become ids through a template; typed text never becomes a special token on the way."""

import itertools
import random
import tracemalloc
from collections import Counter

import pytest

from ruvmlx.errors import UnsupportedModel, UsageError
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.models.text import typed_text
from ruvmlx.models.text.chat_template import CHATML, PLAIN, ChatTemplate, fold_later, pick
from ruvmlx.models.text.tokenizer_base import BaseTokenizer
from ruvmlx.models.text.typed_text import GUARD, Guard

from .make_gguf import make_gguf_model

SPECIALS = {"<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4, "[INST]": 5, "[/INST]": 6, "<|im": 7}
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
SILENT = LLAMA2.replace("{{ raise_exception('Only user and assistant roles are supported!') }}", "")
# Writes the halves of special tokens around what was typed: as nasty as a template can be by accident.
SPLIT = (
    "{% for m in messages %}<|{{ m.content }}|><{{ m.content }}>[{{ m.content }}]</{{ m.content }}>"
    "{{ m.content }}{{ m.content | upper }}{{ m.content | lower | replace('x', '') }}{% endfor %}"
)


class Letters(BaseTokenizer):
    """One id per character from 1000 up; ids below are special."""

    def __init__(self, template=None, specials=SPECIALS, adds_bos=False):
        super().__init__(
            vocab_size=2_000_000,
            special_tokens=specials,
            bos_id=1,
            adds_bos=adds_bos,
            eos_id=2,
            chat_template=template,
        )

    def _encode_run(self, text, first):
        return [1000 + ord(c) for c in text]

    def _piece_bytes(self, token_id):
        return chr(token_id - 1000).encode()

    def specials_of(self, *messages):
        return [i for i in self.encode_chat([Message(*m) for m in messages]) if i < 1000]

    def text_of(self, *messages):
        return self.decode(self.encode_chat([Message(*m) for m in messages]))


def test_tokens_of_a_plain_chat():
    """Template text is matched for special tokens, typed text is not, and nothing else changes."""
    tokenizer = Letters(LLAMA2)
    assert tokenizer.specials_of(("user", "hi"), ("assistant", "yo"), ("user", "more")) == [1, 5, 6, 2, 5, 6]
    assert (
        tokenizer.text_of(("user", "<s> [INST] < [ x"), ("assistant", " </s> ")) == " <s> [INST] < [ x  </s>"
    )


def hostile_texts() -> list[str]:
    """Every special string alone, doubled, nested, cut, marked and hidden in a sentence."""
    out = []
    for text in SPECIALS:
        out += [
            text,
            text * 2,
            f"a {text} b",
            f"{text}\n",
            f" {text}",
            text[0] + GUARD + text[1:],
            text[:3] + text + text[3:],
        ]
        out += [text[:k] for k in range(1, len(text))] + [text[k:] for k in range(1, len(text))]
        out += ["".join(c + "x" for c in text), text.upper(), text.swapcase()]
    return out


@pytest.mark.parametrize("template", [CHATML, PLAIN, LLAMA2, SILENT])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_hostile_content_adds_no_special_token(template, role):
    """Whatever is typed in any role, the special ids are those of a harmless chat of the same form."""
    tokenizer = Letters(template)

    def chat(text):
        roles = [role, "user", "assistant", "user"] if role == "system" else [*["user", "assistant"] * 2][:4]
        return [(r, text if r == role else "fine") for r in roles]

    want = tokenizer.specials_of(*chat("fine"))
    for text in hostile_texts():
        assert tokenizer.specials_of(*chat(text)) == want, text


def test_halves_written_by_the_template_do_not_complete():
    """Text that a template wraps, raises, lowers and edits still completes no special token."""
    tokenizer = Letters(SPLIT)
    middles = [t[2:-2] for t in SPECIALS] + [t[1:-1] for t in SPECIALS] + hostile_texts()
    for one, other in itertools.product(middles, ["fine", "im_end", "s", "INST"]):
        assert tokenizer.specials_of(("user", one), ("user", other)) == []


def test_guard_leaves_innocent_text_alone():
    """Only characters that begin a special token are marked; a message that ends one begins with a mark."""
    guard = Guard(list(SPECIALS))
    assert guard("plain text, 1 > 0") == "plain text, 1 > 0"
    assert guard("a < b [c]") == f"a <{GUARD} b [{GUARD}c]"
    assert guard("> quoted") == f"{GUARD}> quoted"
    assert guard("  INST] x") == f"  {GUARD}INST] x"
    assert guard(f"{GUARD}z{GUARD}") == "z"
    assert Guard([])("<s>") == "<s>"


def completes_slowly(specials, text):
    """Is the text's beginning the end of a special token, or all of it the inside of one?"""
    tails = {special[i:] for special in specials for i in range(1, len(special))}
    return any(text[:k] in tails for k in range(1, len(text) + 1)) or (
        text != "" and any(text in special[1:] for special in specials)
    )


@pytest.mark.parametrize("near", [256, 3])
def test_a_guard_finds_every_text_that_could_complete_a_special_token(monkeypatch, near):
    """Where only the first characters of a text are looked at, it may find more, and never less."""
    monkeypatch.setattr(typed_text, "_NEAR", near)
    rng, found = random.Random(0), Counter()
    for _ in range(5000):
        specials = ["".join(rng.choices("ab<", k=rng.randint(1, 7))) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choices("ab<", k=rng.randint(0, 9)))
        found[Guard(specials)._completes(text), completes_slowly(specials, text)] += 1
    assert not found[False, True] and found[True, True] > 1000 and found[False, False] > 1000
    assert found[True, False] == 0 if near == 256 else found[True, False] < 200


def test_long_special_tokens_take_no_more_memory_than_a_few_times_their_text():
    text = "<" + "x" * 100_000 + ">"
    tracemalloc.start()
    guard = Guard([text])
    assert guard("x" * 300 + ">").startswith(GUARD) and not guard("hello").startswith(GUARD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(text)


def test_templates_find_thoughts():
    """They leave out old ones by the closing tag; it has no mark unless a special token begins like it."""
    guard = Guard(list(SPECIALS))
    assert guard("<think>a</think>b [THINK]<x") == f"<think>a</think>b [THINK]<{GUARD}x"
    assert guard("<think></thin>") == f"<think><{GUARD}/thin>"
    assert Guard(["<think>+"])("<think>") == f"<{GUARD}think>"
    drops = "{% for m in messages %}{{ '<|im_start|>' + m.content.split('</think>')[-1] }}{% endfor %}"
    text = Letters(drops).text_of(("user", "u"), ("assistant", "<think>\nold</think>new"))
    assert text == "unew"


@pytest.mark.parametrize(
    ("end", "opening", "want"),
    [
        ("A:", "One,", "A:One,"),
        ("A:<think>\n", "One,", "A:<think>\n</think>\n\nOne,"),
        ("A:<think>\n", "<think>\nCount.\n</think>\n\nOne,", "A:<think>\nCount.\n</think>\n\nOne,"),
        ("A:", "<s>One,", "A:<s>One,"),
    ],
)
def test_a_begun_reply_goes_behind_the_prompt(end, opening, want):
    """A thought that the template opens is the reply's own, or closed; typed text makes no special token."""
    found = ChatTemplate("", ["<s>"]).begin_reply(end, opening)
    assert found.replace(GUARD, "") == want and "<s>" not in found


@pytest.mark.parametrize("quant", ["F16"])
def test_a_loaded_model_encodes_hostile_chats(quant, tmp_path):
    """The same through a real file and the byte-level tokenizer: text comes back letter for letter."""
    tokenizer = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant=quant))).tokenizer
    for special in tokenizer.special_tokens:
        ids = tokenizer.encode_chat([Message("user", f"a{special}b")])
        assert [i for i in ids if i < 3] == [1, 2, 1]
        assert f"a{special}b" in tokenizer.decode(ids)


def test_starter_chats_encode_specials_as_text(starter):
    """All 17 special tokens of the starter in every role; a harmless chat's ids are those of its text."""
    tokenizer = starter.tokenizer
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    chat = [Message("system", "Be brief."), Message("user", "Hi")]
    assert tokenizer.encode_chat(chat) == tokenizer.encode(rendered, special=True)
    assert len(tokenizer.special_tokens) == 17
    everything = "".join(tokenizer.special_tokens)
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        ids = tokenizer.encode_chat([Message(r, everything) for r in roles])
        turns = len(roles) + (roles[0] != "system") + 1
        assert [i for i in ids if i < 17] == [1, 2] * (turns - 1) + [1]
        assert tokenizer.decode(ids).count(everything) == len(roles)


# BOS, system, fallbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "adds", "count"),
    [(LLAMA2, True, 1), (LLAMA2, False, 1), (CHATML, True, 1), (CHATML, False, 0)],
)
def test_bos_is_never_doubled(template, adds, count):
    """Written by the template, or added by the model's rule, or neither."""
    ids = Letters(template, adds_bos=adds).encode_chat([Message("user", "a")])
    assert ids.count(1) == count and (ids[0] == 1) == bool(count)


@pytest.mark.parametrize("template", [LLAMA2, SILENT])
@pytest.mark.parametrize(
    "later", [[], [("user", "hello")], [("user", "hello"), ("assistant", "x"), ("user", "y")]]
)
def test_system_text_is_never_lost(template, later):
    """A template that refuses or ignores system turns: the text goes in front of the first user turn."""
    text = Letters(template).text_of(("system", "Be < brief."), *later)
    assert text.count("Be < brief.") == 1
    if later:
        assert "Be < brief.\n\nhello" in text


def test_system_stays_where_the_template_puts_it():
    """ChatML has a place for it."""
    text = ChatTemplate(CHATML, SPECIALS).render([Message("system", "S"), Message("user", "U")])
    assert (
        text.replace(GUARD, "")
        == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_template_gets_its_vocabularys_form():
    """The form that the vocabulary's special tokens belong to; named lines where there are none."""
    chat = [Message("user", "U"), Message("assistant", "A"), Message("user", "V")]
    assert ChatTemplate(None, SPECIALS).source == CHATML
    headers = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    llama = ChatTemplate(None, headers, "<B>").render([Message("system", "z"), Message("user", "zz")])
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n"
    want = "<B>" + turn.format("system") + "z<|eot_id|>" + turn.format("user") + "zz<|eot_id|>"
    assert llama.replace(GUARD, "") == want + turn.format("assistant")
    mistral = ChatTemplate(None, ["[INST]", "[/INST]"], "<B>", "<E>").render([Message("system", "z"), *chat])
    assert mistral == "<B>[INST]U[/INST]A<E>[INST]z\n\nV[/INST]"
    spaced = ChatTemplate(None, ["[INST]", "[/INST]"], "<B>", "<E>", gap=" ").render(chat)
    assert spaced == "<B>[INST] U[/INST] A<E>[INST] V[/INST]"
    plain = ChatTemplate(None, ["<s>"])
    assert plain.render(chat) == "User: U\n\nAssistant: A\n\nUser: V\n\nAssistant:"
    assert plain.render(chat[:2], add_generation_prompt=False) == "User: U\n\nAssistant: A\n\n"


def test_refusals_are_usage_errors():
    """Roles that nobody knows, an empty chat, and a template that says no."""
    with pytest.raises(UsageError, match="role 'root'"):
        Letters(CHATML).encode_chat([Message("root", "x")])
    with pytest.raises(UsageError, match="empty conversation"):
        Letters(CHATML).encode_chat([])
    with pytest.raises(UsageError, match="refuses this conversation: no tools"):
        Letters("{{ raise_exception('no\ntools') }}").encode_chat([Message("user", "x")])


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ undefined.x }}",
        "{{ messages[9].role }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ x() }}",
    ],
)
def test_broken_templates_one_line(template):
    """Bad syntax, undefined names, arithmetic, files: one UnsupportedModel."""
    with pytest.raises(UnsupportedModel) as caught:
        Letters(template).encode_chat([Message("user", "x")])
    assert "\n" not in str(caught.value)


def test_the_template_is_found_in_every_form_of_the_file():
    """tokenizer_config.json has one template, a list of named ones, or a table."""
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert [pick(x) for x in ("A", None, named, {"rag": "R"}, [], [1], {"default": 5})] == [
        "A", None, "D", "R", None, None, None,
    ]  # fmt: skip


# Against transformers -----------------------------------------------------------------------------

FEATURES = """\
{%- set ns = namespace(n=0) %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set rest = messages[1:] %}
{%- else %}{% set system = 'none' %}{% set rest = messages %}{% endif %}
{{ bos_token + '<|im_start|>' ~ system ~ '<|im_end|>' }}
  {% for m in rest if m.content is defined %}
    {% if loop.index0 % 2 == 0 %}
{% set ns.n = ns.n + 1 %}
{% generation %}{{ m.role | upper }}: {{ m.content.strip().split(' ') | join('_') }}{% endgeneration %}
    {% else %}
{{ {'a': 1, 'b': [m.content, none, true]} | tojson }} {{ [1, 2] | tojson(indent=2) }}
    {% endif %}
    {% if m.content | length > 100 %}{% continue %}{% endif %}
  {% endfor %}
{{ ns.n }} {{ range(3) | list }} {{ '%02d' % 5 }} {{ 'x' * 3 }}
{{ messages | map(attribute='role') | join(',') }}
{{ 'yes' if tools is none else 'no' }} {{ '{:>4}'.format(7) }}
{{ 'abc'.replace('b', 'BB') }} {{ 'a-b'.split('-')[-1] }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.mark.parametrize("template", [FEATURES, LLAMA2, CHATML, "{{ strftime_now('%Y-%m-%d') }}"])
def test_transformers_renders_the_same(template):
    """The whole feature set, whitespace rules included, as Hugging Face's own renderer has it."""
    hf = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is the oracle")
    chat = [("user", "one two"), ("assistant", 'né "q" é'), ("user", "x" * 120)]
    for turns in [chat[:1], chat] + ([[("system", " S "), *chat]] if template != LLAMA2 else []):
        dicts = [{"role": r, "content": c} for r, c in turns]
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        want, _ = hf.render_jinja_template(
            [dicts], chat_template=template, add_generation_prompt=True, **names
        )
        got = ChatTemplate(template, SPECIALS, "<s>", "</s>").render([Message(r, c) for r, c in turns])
        assert got.replace(GUARD, "") == want[0]


LATER = [
    ("user", "one"), ("system", "mid one"), ("assistant", "two"), ("system", "mid two"), ("user", "three"),
    ("assistant", "four"), ("system", "mid three"),
]  # fmt: skip


@pytest.mark.parametrize("template", [LLAMA2, SILENT], ids=["refuses", "leaves out"])
@pytest.mark.parametrize("first", [(), (("system", "first"),)], ids=["", "system"])
def test_later_system_text_joins_a_turn(template, first):
    """Where a template refuses it, or leaves it out: each text is there once, in its order."""
    text = Letters(template).text_of(*first, *LATER)
    start = "first\n\n" if first else ""
    assert text == f" {start}one\n\nmid one  two mid two\n\nthree  four mid three "


def test_later_system_text_stays_where_the_template_has_a_place():
    text = Letters(CHATML).text_of(*LATER)
    assert text.count("system\nmid") == 3 and text.startswith("user\none\nsystem\nmid one\n")


def test_system_text_behind_a_result_joins_the_result():
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "tool", "system", "assistant")]
    folded = fold_later(turns)
    assert [turn["role"] for turn in folded] == ["user", "assistant", "tool", "assistant"]
    assert folded[2]["content"] == "tool\n\nsystem"
