"""How a drawn user rates. This module imports nothing, so that the command's help is quick."""

RATERS = {  # way of rating -> its share of the drawn users
    "stars": 0.4,
    "noisy": 0.2,  # stars, some of them reversed
    "thumbs": 0.2,  # up for 4 or 5 stars, down for 1 or 2
    "only-up": 0.1,
    "only-down": 0.1,
}
