"""Which lines count as code."""

from .code_lines import code_lines

SOURCE = '''"""A module
of two lines."""

import os  # a comment behind code counts as code

# a comment alone does not


def f(
    x,
):
    """One line."""
    text = """not
    a docstring"""
    return text
'''


def test_docstrings_comments_and_empty_lines_are_no_code():
    assert code_lines(SOURCE) == {4, 9, 10, 11, 13, 14, 15}
