"""This module has the ways in which drawn users rate. It imports nothing, so that the command's help is
fast."""

RATERS = {  # the way to rate -> its share of the drawn users
    "stars": 0.4,
    "noisy": 0.2,  # gives stars, and reverses some of them
    "thumbs": 0.2,  # thumb up for 4 or 5 stars, thumb down for 1 or 2 stars
    "only-up": 0.1,
    "only-down": 0.1,
}
