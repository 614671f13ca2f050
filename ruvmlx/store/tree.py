"""This module shows the messages of a chat as a tree: an edited question or a regenerated reply starts a new
branch.

The store overwrites no message. The conversation is one path through the tree, from a first message to the
chat's head. The messages of the other branches stay in the store.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol


class Node(Protocol):
    """A message. parent: the id of the previous message; None: the message is a first message."""

    @property
    def id(self) -> int: ...

    @property
    def parent(self) -> int | None: ...

    @property
    def role(self) -> str: ...


class Tree:
    """The tree of a chat. nodes: the chat's messages, oldest first; a parent is older than its children."""

    def __init__(self, nodes: Sequence[Node]):
        self._nodes = {node.id: node for node in nodes}
        self._children: dict[int | None, list[Node]] = defaultdict(list)
        for node in nodes:
            self._children[node.parent].append(node)

    def path(self, head: int | None) -> list[int]:
        """Return the ids from the first message of a branch to `head`."""
        found: list[int] = []
        while head is not None and head in self._nodes:
            found.append(head)
            head = self._nodes[head].parent
        return found[::-1]

    def siblings(self, of: int) -> list[int]:
        """Return the ids that can be shown in place of a message: the replies to every version of the same
        question. For a message that does not follow a user's message directly, return the ids with the same
        parent.

        If a version of the question has no reply, the list has the id of this version itself. of: the id of a
        reply or a question.
        """
        question = self._question(of)
        if question is None:
            return [node.id for node in self._children[self._nodes[of].parent]]
        versions = [n for n in self._children[question.parent] if n.role == "user"]
        return [id_ for version in versions for id_ in self._replies(version)]

    def versions(self, of: int) -> list[int]:
        """Return the ids of a message and of its other versions. The versions of a reply answer the same
        question, in the same words. The versions of a question follow the same message."""
        node = self._nodes[of]
        return [other.id for other in self._children[node.parent] if other.role == node.role]

    def newest_leaf(self, top: int) -> int:
        """Return the newest message among all messages that follow a message in the tree; the message itself
        if it has no children."""
        newest, todo = top, [top]
        while todo:
            node = todo.pop()
            newest = max(newest, node)
            todo += [child.id for child in self._children[node]]
        return newest

    def _question(self, of: int) -> Node | None:
        """Return the message itself if the user wrote it, else the user's message directly before it; None if
        there is none."""
        node = self._nodes[of]
        if node.role == "user" or node.parent is None:
            return node if node.role == "user" else None
        parent = self._nodes[node.parent]
        return parent if parent.role == "user" else None

    def _replies(self, question: Node) -> list[int]:
        replies = [node.id for node in self._children[question.id] if node.role == "assistant"]
        return replies or [question.id]
