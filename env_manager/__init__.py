"""Plays episodes: leases them, lets policy and environment take turns, has them scored, and hands them in."""
