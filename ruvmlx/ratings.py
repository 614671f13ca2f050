"""The ratings that a user can give to a reply."""

RATINGS = ("up", "down", "1", "2", "3", "4", "5")
