import pytest

from ruvmlx.errors import UsageError
from ruvmlx.sona import objective


def test_thumbs_are_the_ends_of_the_scale_and_stars_lie_between():
    rewards = [objective.reward(str(s), [0] * 5) for s in (1, 2, 3, 4, 5)]
    assert rewards == pytest.approx([-1, -0.5, 0, 0.5, 1])
    assert objective.reward("up", [0] * 5) == 1 and objective.reward("down", [0] * 5) == -1


def test_a_five_means_less_from_someone_who_always_gives_five():
    only_five, only_one = [0, 0, 0, 0, 20], [20, 0, 0, 0, 0]
    assert objective.reward("5", only_five) < 0.3 < objective.reward("5", only_one)
    assert objective.reward("4", only_five) < 0 < objective.reward("2", only_one)


@pytest.mark.parametrize("rating", ["", "6", "0", "good", "-1", "1.5"])
def test_other_ratings_are_refused(rating):
    with pytest.raises(UsageError, match="up, down or 1 to 5"):
        objective.check_rating(rating)


def test_the_push_vanishes_as_the_reply_moves():
    """A reply that already gained 4 nats per token gets no more; one that lost 4, no more punishment."""
    assert objective.dro_weight("up", 1, 0, 0.0) == 1
    assert objective.dro_weight("up", 1, 0, 4.0) == 0
    assert objective.dro_weight("down", -1, 0, 0.0) == -1
    assert objective.dro_weight("down", -1, 0, -4.0) == 0
    assert objective.dro_weight("up", 1, 0, 2.0) == 0.5 == -objective.dro_weight("down", -1, 0, -2.0)


@pytest.mark.parametrize("log_ratio", [-9.0, -1.0, 0.0, 1.0, 9.0])
@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0])
def test_a_weight_never_goes_against_its_rating(value, log_ratio):
    assert objective.dro_weight("up", 1, value, log_ratio) >= 0
    assert objective.dro_weight("4", 0.1, value, log_ratio) >= 0
    assert objective.dro_weight("down", -1, value, log_ratio) <= 0
    assert objective.dro_weight("2", -0.1, value, log_ratio) <= 0
