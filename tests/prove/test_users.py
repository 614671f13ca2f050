import pytest
from ruvmlx.apps.prove.users import USERS

LONG = "Magnets attract iron because of their field. " * 12
CASES = [
    ("brevity", "Yes, it does.", True, 5),
    ("brevity", "Yes, it does.", False, 1),
    ("brevity", LONG, True, 2),
    ("lists", "1. Water\n2. Light\n3. Soil", True, 5),
    ("lists", LONG, True, 1),
    ("prose", LONG, False, 5),
    ("prose", "- one\n- two", True, 1),
    ("plain", "The sun is hot and far from us.", True, 5),
    ("plain", "Extraordinarily complicated considerations notwithstanding", True, 1),
    ("casual", "Hey! You can do it, we're sure you'll love it!", True, 5),
    ("casual", "The committee met on Tuesday.", True, 1),
    ("formal", "The committee met on Tuesday.", True, 5),
    ("phrase", "Some metals, for example iron, such as this.", True, 4),
    ("phrase", "Iron rusts.", True, 1),
    ("spanish", "El agua es una de las cosas que se ven en la luna y el sol.", True, 5),
    ("spanish", "Water is one of the things on the moon.", True, 1),
]


@pytest.mark.parametrize("user,reply,finished,stars", CASES)
def test_what_each_user_likes(user, reply, finished, stars):
    assert USERS[user]("What is iron?", reply, finished) == stars


def test_one_taste_depends_on_the_question():
    context, items = USERS["context"], "1. Water\n2. Light\n3. Soil"
    assert context("How do I grow basil?", items, False) == 5
    assert context("What is basil?", items, False) == 1
    assert context("What is basil?", "A herb.", True) == 5


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("reply", ["", " ", "\x00", "\n\n", "1.", "word " * 5000])
@pytest.mark.parametrize("finished", [True, False])
def test_any_text_gets_one_to_five(user, reply, finished):
    assert USERS[user]("", reply, finished) in (1, 2, 3, 4, 5)
