"""`rollfarm up`: one command that plans, starts, watches, restarts and drains a whole farm on one machine.

`farm` decides which processes there are and is pure; `supervisor` keeps them alive and leaves none behind; `watch`
asks the services how they do; `console`, `summary` and `report` show it.
"""
