"""This package implements the command `ruvmlx prove`, which measures whether ratings make replies better.
Simulated users rate replies of the user's model. Replies to held-out prompts, which no simulated user rates,
show the result.

users     has simulated users: functions that rate (prompt, reply, finished) with 1 to 5 stars
trial     runs an experiment with one seed and one arm (a way to learn): ratings, replies to held-out prompts
retention measures other changes of the model: KL, perplexity, variety
report    computes win-rates over seeds, with their confidence intervals
drawn_*   draw users with random tastes, run their trials, and report the results

tests/research/taste_study.py compares models of a user's taste: which model predicts best from few ratings.
"""
