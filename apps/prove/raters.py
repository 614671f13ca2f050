"""This module lists the ways in which drawn users (simulated users with random tastes) rate. The module
imports nothing, so that `ruvmlx prove --help`, which lists these ways, starts fast."""

RATERS = {  # the way to rate -> its share of the drawn users
    "stars": 0.4,
    "noisy": 0.2,  # the user gives stars, and reverses some ratings to 6 - stars
    "thumbs": 0.2,  # the user presses a thumb up for 4 or 5 stars, and a thumb down for 1 or 2 stars
    "only-up": 0.1,
    "only-down": 0.1,
}
