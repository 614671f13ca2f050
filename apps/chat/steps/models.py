"""This module has the steps for the model, the model's adapters and the system prompt."""

from ruvmlx.runtime import Runtime

from .. import describe, models, roles
from ..state import ChatState, Outcome, text_outcome
from .settings import value_lines
from .write import with_tools


def use_model(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Switch to another model, by its name or number. Without an argument, describe the model in use."""
    if not argument:
        return Outcome(models.in_use_line(runtime.model))
    name = models.find_model(argument, runtime.model, state.options.files, state.listed_models)
    return Outcome(model=name)


def list_models(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    listed = models.models(runtime.model, auto=runtime.is_auto)
    state.listed_models = [entry.name for entry in listed]
    return Outcome("\n".join(models.model_lines(listed)))


def use_adapter(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Switch to the named adapter, and describe the adapter in use. The argument "none" means the original
    model without an adapter. "NAME new" starts a new adapter. The chosen adapter is that of the next
    start, too. Without an argument, only describe the adapter in use."""
    kept = ""
    if argument:
        name = models.find_adapter(argument, runtime)
        runtime.learning.use(name)
        if name is not None and argument != name:  # "NAME new"
            runtime.store.adapters.begin(runtime.model.fingerprint, name)
        state.lesson = None  # the former adapter learned it
        kept = models.remember_adapter(name) if state.options.keeps_adapter else ""
    said = " ".join(filter(None, (describe.adapter(runtime), kept)))
    return Outcome(said, notice=said, learned=True)


def list_adapters(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return Outcome("\n".join(models.adapter_lines(runtime)))


def system(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Set the system prompt of the open chat, and show it. The argument "none" removes the system prompt.
    Without an argument, only show the system prompt."""
    if argument:
        prompt = None if argument == "none" else argument
        runtime.chats.set_system(state.session, prompt)
        state.system = prompt
    return text_outcome(
        describe.system_prompt(state.system, "" if state.system else runtime.chats.template_system())
    )


def answer_as(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Use the system prompt of the role (see roles.py) that the argument names in the open chat. "none"
    ends the role: the chat then has the system prompt of the user's settings, or no system prompt. "save
    NAME" saves the chat's system prompt as the role NAME. Without an argument, list the roles."""
    word, _, name = argument.partition(" ")
    if not word:
        return text_outcome("\n".join(roles.lines(state.system)))
    if word == "save":
        before = roles.beginning(name.strip()) if name.strip() in roles.names() else ""
        file = roles.save(name.strip(), state.system or "")
        replaced = f", in place of: {before}" if before else ""
        return text_outcome(f"Kept as the role {file.stem}, in {file}{replaced}")
    if word == "none" and not roles.in_use(state.system):
        return text_outcome(f"No role is in use. {system(runtime, state, '').words}")
    if word == "none":
        return system(runtime, state, state.users_system or "none")
    return text_outcome(f"Role: {argument.lower()}. {system(runtime, state, roles.text(argument)).words}")


def prompt(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    """Show the whole prompt of the next reply, with the markers that the chat template adds. The message
    "..." stands for the next message of the user."""
    tools = with_tools(state)
    return text_outcome(runtime.chats.prompt_text(state.session, state.options.max_new_tokens, **tools))


def status(runtime: Runtime, state: ChatState, _: str) -> Outcome:
    return text_outcome("\n".join([*describe.status_lines(runtime), *value_lines(runtime, state.options)]))
