"""Commands for the model, its adapters and the system prompt."""

from ruvmlx.runtime import Runtime

from .. import describe, models
from ..state import ChatState, Outcome, told


def use_model(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, describe the model in use."""
    if not argument:
        return Outcome(models.in_use_line(runtime.model))
    return Outcome(model=models.find_model(argument, runtime.model, state.options.files))


def list_models(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("\n".join(models.model_lines(runtime.model)))


def use_adapter(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, describe the adapter in use; "none" uses the original model."""
    if argument:
        runtime.use_adapter(None if argument == models.NO_ADAPTER else argument)
    said = describe.adapter(runtime)
    return Outcome(said, notice=said, learned=True)


def list_adapters(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("\n".join(models.adapter_lines(runtime)))


def system(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Without an argument, show the system prompt; "none" removes it."""
    if argument:
        prompt = None if argument == "none" else argument
        runtime.chats.set_system(state.session, prompt)
        state.system = prompt
    return told(describe.system_prompt(state.system))


def status(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return told("\n".join(describe.status_lines(runtime)))
