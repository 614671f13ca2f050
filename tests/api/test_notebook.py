"""`ruvmlx.notebook`: replies stream into a notebook, and its buttons rate them."""

import builtins
import json
import sys

import pytest

import ruvmlx
from ruvmlx.api import notebook
from ruvmlx.errors import RuvmlxError

widgets = pytest.importorskip("ipywidgets", reason="the group `notebook` is not installed")


@pytest.fixture
def model(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as opened:
        yield opened


def test_a_reply_grows_and_its_buttons_rate_it(model, monkeypatch):
    """The weights change at a click, and back; each click says what it did."""
    monkeypatch.setattr(notebook, "FRAME", 0.0)
    view, drawn = notebook.ReplyView(), list[str]()
    view.text.observe(lambda change: drawn.append(change["new"]), "value")
    assert view.buttons["Good"].disabled
    view.show(model.chat().stream("hello"))
    assert len(drawn) > 1 and view.reply.answer[:1] in view.text.value
    view.buttons["Bad"].click()
    assert model.learned().ratings == 1 and view.note.value == "Learned: less like this"
    view.buttons["Good"].click()
    assert view.note.value == "Learned: more like this" and not view.undo.disabled
    view.undo.click()
    assert view.note.value.startswith("Taken back") and view.undo.disabled and model.learned().ratings == 0


def test_take_back_is_of_its_own_reply(model):
    """Also where another reply was rated after it."""
    views = [notebook.ReplyView(), notebook.ReplyView()]
    for view, words in zip(views, ("hello", "you"), strict=True):
        view.show(model.chat().stream(words))
        view.buttons["Good"].click()
    views[0].undo.click()
    assert model.learned().ratings == 1
    kept = model._call(lambda runtime: runtime.learning.state().recent)
    assert [row.reply_id for row in kept] == [views[1].reply.id]


def test_a_view_that_shows_another_reply_rates_that_reply_once(model, monkeypatch):
    view, rated = notebook.ReplyView(), list[str]()
    first, second = model.reply("hello"), model.reply("you")
    done = first.rate("up")
    monkeypatch.setattr(model, "rate", lambda reply, *_: rated.append(reply.id) or done)
    view.show(first)
    view.buttons["Good"].click()
    view.show(second)
    assert view.undo.disabled and view.note.value == ""
    view.buttons["Good"].click()
    assert rated == [first.id, second.id]


def test_a_finished_reply_is_shown_and_an_error_is_one_line(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", max_tokens=4, adapter="none") as model:
        view = notebook.ReplyView()
        view.show(model.reply("hello"))
        view.buttons["Good"].click()
        assert "Start without --adapter none" in view.note.value and view.undo.disabled


def test_html_of_a_reply_is_shown_as_text():
    view = notebook.ReplyView()
    view._draw("<think>why</think><b onclick='x()'>bold\x1b[31m</b>")
    assert (
        "&lt;b onclick=" in view.text.value and "why" not in view.text.value and "\x1b" not in view.text.value
    )


def test_an_interrupt_keeps_the_words_so_far(model):
    stream = model.chat().stream("hello", max_tokens=400)
    stopped = notebook.ReplyView()
    draw, count = stopped._draw, iter([KeyboardInterrupt])

    def interrupt(text):
        for error in count:
            raise error
        draw(text)

    stopped._draw = interrupt
    stopped.show(stream)
    assert stopped.reply.finish_reason == "cancelled" and not stopped.buttons["Good"].disabled


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def refuse_widgets(name, *more):
        if name == "ipywidgets":
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse_widgets)
    monkeypatch.delitem(sys.modules, "ipywidgets")
    with pytest.raises(RuvmlxError, match=r"uv sync --inexact --extra notebook"):
        notebook.ReplyView()


def test_a_notebook_runs(tiny_folder, home):
    """In a real kernel: the cell shows a widget with the reply, and nothing else."""
    nbclient = pytest.importorskip("nbclient", reason="the group `notebook` is not installed")
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "import ruvmlx\nfrom ruvmlx.notebook import show\n"
        f"model = ruvmlx.open({str(tiny_folder)!r}, backend='reference', temperature=0, max_tokens=6)",
        "show(model.chat().stream('hello'))",
        "model.close()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
    [output] = book.cells[1].outputs
    state = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"]
    assert output.data["application/vnd.jupyter.widget-view+json"]["model_id"] in state
    assert "pre-wrap" in json.dumps(state) and "Take back" in json.dumps(state)
