"""How a drawn user rates. Nothing is imported here, so that the command's help is quick."""

RATERS = {  # the share of drawn users that rate so
    "stars": 0.4,
    "noisy": 0.2,  # stars, some of them turned around
    "thumbs": 0.2,  # up from 4 stars on, down until 2
    "only-up": 0.1,
    "only-down": 0.1,
}
