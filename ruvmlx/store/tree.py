"""The messages of a chat as a tree: every question that was put anew, every reply written again is a branch.

Nothing is overwritten. One path, from the first message to the chat's head, is the conversation as it is
shown and read; the other branches stay beside it.
"""

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    id: int
    parent: int | None  # the message before it
    role: str


class Tree:
    """nodes: a chat's messages, the oldest first; a parent is older than its children."""

    def __init__(self, nodes: list[Node]):
        self._nodes = {node.id: node for node in nodes}
        self._children: dict[int | None, list[Node]] = defaultdict(list)
        for node in nodes:
            self._children[node.parent].append(node)

    def path(self, head: int | None) -> list[int]:
        """The conversation that ends with `head`, from its first message on."""
        found: list[int] = []
        while head is not None and head in self._nodes:
            found.append(head)
            head = self._nodes[head].parent
        return found[::-1]

    def alternatives(self, of: int) -> list[int]:
        """What stands in one place of the conversation: all replies to the question that `of` is or answers,
        in each of its wordings. A wording without a reply stands for itself."""
        question = self._question(of)
        if question is None:
            return [node.id for node in self._children[self._nodes[of].parent]]
        wordings = [n for n in self._children[question.parent] if n.role == "user"]
        return [id_ for wording in wordings for id_ in self._replies(wording)]

    def newest_leaf(self, below: int) -> int:
        """The end of the branch that was last added to under a message; itself where there is nothing."""
        newest, todo = below, [below]
        while todo:
            node = todo.pop()
            newest = max(newest, node)
            todo += [child.id for child in self._children[node]]
        return newest

    def _question(self, of: int) -> Node | None:
        node = self._nodes[of]
        if node.role == "user" or node.parent is None:
            return node if node.role == "user" else None
        parent = self._nodes[node.parent]
        return parent if parent.role == "user" else None

    def _replies(self, question: Node) -> list[int]:
        replies = [node.id for node in self._children[question.id] if node.role == "assistant"]
        return replies or [question.id]
