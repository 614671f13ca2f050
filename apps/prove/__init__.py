"""`ruvmlx prove`: does rating help? Simulated users rate the real model; held-out prompts show the result.

users     a simulated person's taste: (prompt, reply, finished) -> 1..5
trial     one seed of one arm: reply, rate, and answer the held-out prompts at every checkpoint
retention what else changed: KL, perplexity, variety, length
report    win-rates with their intervals, over seeds
drawn_*   users drawn from a space of tastes: what they like, their trials, the report
taste_study  compares models of a user's taste: which predicts best from few ratings
"""
