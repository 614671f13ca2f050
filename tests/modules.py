"""A test module whose packages are not installed still has its tests: each is skipped and says why."""

import ast
from collections.abc import Iterable, Iterator

import pytest


class Module(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return list(super().collect())
        except pytest.skip.Exception as missing:
            return list(self._left_tests(missing.msg or ""))

    def _left_tests(self, reason: str) -> Iterator[pytest.Item]:
        for node in ast.walk(ast.parse(self.path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                left = LeftTest.from_parent(self, name=node.name)
                left.add_marker(pytest.mark.skip(reason=reason))
                yield left


class LeftTest(pytest.Item):
    """A test of such a module; how many cases it has is not known."""

    def runtest(self) -> None:
        raise AssertionError("its mark skips it")

    def reportinfo(self) -> tuple[object, int, str]:
        """The same line for all: one line of the summary counts them."""
        return self.path, 0, self.name
