"""The suite of the host's time runs, and says what it measured."""

from tests.research import host_time


def test_the_host_suite_has_named_rows_and_bars(monkeypatch):
    """One short turn each: names, a bar for the plain cache and for what a GPU runs, times that are times."""
    monkeypatch.setattr(host_time, "TOKENS", 4)
    said = []
    rows = host_time.run(1, said.append)
    assert said == ["host time of a token: 1 rounds of 4 tokens"]
    plain, others, gpu = [host_time.BAR, None], [None] * 4, [host_time.BAR, None] * 2
    assert [row.target for row in rows] == plain + others + gpu
    assert all(row.value > 0 and row.unit == "x" and "mlx-lm" in row.note for row in rows)


def test_the_first_token_is_not_counted():
    """What comes before it is the prompt's."""
    counted = []

    def turn():
        for i in range(5):
            counted.append(i)
            yield i

    cpu, wall = host_time.cost(turn)
    assert counted == [0, 1, 2, 3, 4] and 0 <= cpu <= wall + 1e-3
