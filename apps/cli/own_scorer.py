"""This module loads the user's own simulated user for `ruvmlx prove --scorer`."""

import importlib.util
from pathlib import Path

from ruvmlx.errors import UsageError


def own_scorer(given: str):
    """Load the user's scorer, a function that gives stars to a reply. given: "FILE.py:function". The result
    is a function that calls the scorer and checks that the stars are a whole number from 1 to 5."""
    path, _, name = given.rpartition(":")
    if not path or not Path(path).is_file():
        raise UsageError(f"no scorer {given!r}; give a Python file and a function: taste.py:score.")
    spec = importlib.util.spec_from_file_location("ruvmlx_scorer", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise UsageError(f"{path} cannot be loaded: {type(e).__name__}: {e}.") from e
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name!r}.")
    return check_stars_of(function, given)


def check_stars_of(function, given: str):
    def score(prompt: str, reply: str, finished: bool) -> int:
        try:
            stars = function(prompt, reply, finished)
        except Exception as e:
            raise UsageError(f"{given} failed: {type(e).__name__}: {e}.") from e
        if isinstance(stars, bool) or stars not in (1, 2, 3, 4, 5):
            raise UsageError(f"{given} returned {stars!r}; expected a whole number from 1 to 5.")
        return int(stars)

    return score
