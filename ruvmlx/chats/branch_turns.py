"""This module finds places in the turns of a chat's current branch."""

from ..engine.context_window import Turn
from ..errors import NotFound


def place_of(turns: list[Turn], message: int, role: str | None = None) -> int:
    """Return the place of a message among the turns. Raises NotFound if no turn has this message id, or if
    its role is another than `role`."""
    for place, turn in enumerate(turns):
        if turn.id == message and role in (None, turn.role):
            return place
        if turn.id == message:
            raise NotFound(f"message {message} has the role {turn.role}; a message of the {role} is needed.")
    raise NotFound(f"message {message} is not in the conversation shown.")


def end_of_question(turns: list[Turn], message: int | None) -> int:
    """Return the number of turns up to the question that the reply `message` (None: the last reply) answers.
    Raises NotFound if there is no question."""
    end = len(turns) if message is None else place_of(turns, message) + 1
    while end and turns[end - 1].role != "user":
        end -= 1
    if not end:
        raise NotFound("there is no question yet to answer again.")
    return end
