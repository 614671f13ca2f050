"""This package is `ruvmlx prove`, which measures whether ratings help. Simulated users rate replies of the
real model. Held-out prompts (prompts that no user rates replies to) show the result.

users     simulated users: functions that rate (prompt, reply, finished) with 1 to 5 stars
trial     one seed of one arm (one way to learn): replies, ratings, and held-out replies at every checkpoint
retention the other changes of the model: KL, perplexity, variety, length
report    win-rates over seeds, with their confidence intervals
drawn_*   users that are drawn at random from a space of tastes: their tastes, their trials, the report

tests/research/taste_study.py compares models of a user's taste: which model predicts best from few ratings.
"""
