"""This package watches how fast and how good the replies are, and makes the runtime faster where a
measurement shows that this helps.

`monitor.py` has the figures of the newest replies, `quality.py` estimates the quality of one reply. Each
action of the optimizer is a row of the witness log (store/audit_log.py).
"""
