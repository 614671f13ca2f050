"""The app saves a result of each tool call that the user stops. These tests need no tool server."""

from types import SimpleNamespace

from ruvmlx.apps.chat.actions import tools
from ruvmlx.apps.chat.messages import ToolMessage
from ruvmlx.apps.chat.tools.chat_tools import STOPPED

from ruvmlx.errors import Interrupted
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import Turn

from .helpers import chatting
from .scripted import ScriptedRuntime


async def test_a_stopped_call_without_later_calls_gets_its_result(monkeypatch):
    """The app has no later call to show. An error here would leave the call without a result."""
    call, saved = ParsedCall("a1B2c3D4e", "slow", "{}"), []

    async def stop(self, call, shown):
        raise Interrupted("stopped.")

    def save_results(runtime, session, results):
        saved.extend(results)
        return [Turn("tool", text, calls=(call,)) for call, text in results]

    monkeypatch.setattr(tools.ToolActions, "_result_of", stop)
    monkeypatch.setattr(tools, "save_results", save_results)
    async with chatting(ScriptedRuntime(["One."])) as (app, _):
        await tools.ToolActions(app.chat).run_calls(
            "s0", SimpleNamespace(finish_reason="stop", calls=(call,))
        )
        assert saved == [(call, STOPPED)]
        assert [message.result for message in app.query(ToolMessage)] == [STOPPED]
